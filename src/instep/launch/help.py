"""`instep run --help`: the options that people use first, the rest in groups, examples."""

HELP = """\
usage: instep run [options] script.py [arguments of the script]
       instep run [options] -m package.module [arguments of the module]

Starts the script on several processes (ranks), as torchrun does, watches them, and says what went wrong: which rank,
which line, why, and what to do. The script needs no change. Every option of torchrun means the same here.

first of all
  -n, --nproc-per-node N      ranks on this machine: a number, auto, cpu, gpu or xpu (default 1)
  -m, --module                run a module, as `python -m` does
  --set NAME=VALUE            override an argument of instep.Run without editing the script; may be repeated
  --run-dir DIR               where logs and findings go (default runs/<script>-<time>)
  --nnodes N or LEAST:MOST    number of machines (default 1)
  --node-rank K               number of this machine, 0 is the one that the others come to (default 0)
  --master-addr HOST          address of machine 0 (default 127.0.0.1)
  --master-port PORT          port on machine 0 (default: 29500 with several machines, a free one otherwise)
  --max-restarts N            start all ranks again after a failure, at most N times (default 0)
  --quiet-ranks               show the output of rank 0 only; that of all ranks is kept in the run directory

watching
  --stall-after SECONDS       report a stall after that long without progress (default 30)
  --on-stall report|stop      whether a stall ends the run (default report; a proven deadlock always does)
  --no-watch                  do not look into the ranks; crashes are still explained
  --no-fork                   start each rank as a fresh interpreter instead of forking from one that has imported torch
  --profile FIRST:LAST        record these steps of every rank with PyTorch's profiler, into rank<k>/trace.json

machines that find each other
  --standalone                this machine alone, on a free port
  --rdzv-backend NAME         static (default), c10d, etcd-v2 or etcd
  --rdzv-endpoint HOST:PORT   where they meet
  --rdzv-id ID                name of the run, the same on every machine
  --rdzv-conf K=V,...         more for the backend, as timeout=60
  --local-addr ADDR           the address of this machine that others shall use

output
  --log-dir DIR               a folder for the files of --redirects and --tee
  -r, --redirects WHICH       into files instead of the terminal: 0 none, 1 stdout, 2 stderr, 3 both; or 0:1,1:3 by rank
  -t, --tee WHICH             into files and to the terminal
  --local-ranks-filter 0,1    show only these local ranks
  --duplicate-stdout-filters TEXT,...   --duplicate-stderr-filters TEXT,...
                              copy teed lines that contain one of the texts into a file of their own

how ranks run and end
  --no-python                 the script is a command, run it as it is
  --run-path                  accepted as torchrun does: the script runs inside the rank's own interpreter
  --role NAME                 seen by the ranks as ROLE_NAME
  --monitor-interval SECONDS  how often torch's agent looks, with several machines (default 0.1)
  --shutdown-timeout SECONDS  between SIGTERM and SIGKILL (default 30 after a signal, 5 after a failure)
  --signals-to-handle NAMES   signals that end the run in order (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)
  --start-method METHOD       accepted; ranks are forked or fresh as described above
  --numa-binding MODE         node, socket, exclusive or core-complex: keep each rank near its GPU
  --virtual-local-rank        every rank sees one GPU, as device 0
  --event-log-handler NAME    --logs-specs NAME   entry points of torch's agent

Each option of torchrun can be given as a variable too: PET_NPROC_PER_NODE=4.

examples
  instep run -n 4 train.py --epochs 3
  instep run -n 4 -m package.train --epochs 3
  two machines, run on each with its own --node-rank:
    instep run -n 8 --nnodes 2 --node-rank 0 --master-addr node0 --master-port 29500 train.py
  Slurm, one task per node:
    srun --ntasks-per-node=1 instep run -n 8 --nnodes $SLURM_NNODES --rdzv-backend c10d \\
        --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $(scontrol show hostnames | head -1):29500 train.py

Exit code: 0 when every rank ended with 0; else the failing rank's (128 + signal when it was killed), 2 for bad usage,
69 when machines did not meet or one was lost, 124 when a stall was stopped, 130 after Ctrl-C, 143 after SIGTERM.
"""
