import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TiedLM(nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, ids, h=None):
        y, h = self.rnn(self.emb(ids), h)
        return self.out(y), h


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    text = torch.randint(0, 64, (16 * world, 2001))[rank::world]
    model = DDP(TiedLM())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    hidden = None
    for i in range(0, 1984, 32):
        logits, hidden = model(text[:, i : i + 32], hidden)
        hidden = hidden.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, i + 1 : i + 33].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        print(loss.item())
    dist.destroy_process_group()


main()
