"""What a rank's memory was made of at its highest, as sentences and evidence."""

from __future__ import annotations

from instep.diagnose.rank_view import RankView
from instep.records.finding import Evidence
from instep.units import format_bytes


def cite_kinds(view: RankView) -> tuple[Evidence, ...]:
    """Bytes by kind after the first steps; nothing when the rank did not come so far. Optimizers add up."""
    rows = view.named("memory-kinds")
    first = {row["optimizer"]: row for row in rows}.values()  # the newest of each kind of optimizer
    if not rows:
        return ()
    total = {key: sum(row[key] for row in first) for key in ("parameters", "gradients", "optimizer_state")}
    peak = max(row["peak"] for row in rows)
    if rows[-1]["device"] == "cpu":  # at the end of the process it is known to the last byte
        peak = max(peak, (view.failure or {}).get("peak_bytes") or 0)
    rest = peak - sum(total.values())
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in total.items())
    what = "activations and the rest" if rows[-1]["device"] != "cpu" else "activations, data, Python and torch itself"
    return (
        view.cite(
            f"after step {rows[-1].step}: {parts}; at the highest {format_bytes(peak)}, of which {what} {format_bytes(max(0, rest))}"
        ),
    )
