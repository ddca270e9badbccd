"""A PyTorch process that works on command: the other end of common.Workers.

`serve(make)` reads the arguments CASE.json --rank R --ranks N --store FILE, joins the processes by gloo, makes the work, and then
reads a number a line from the standard input of process 0: so many times it calls work.run(), which returns {name: value}, and
prints {name: values} as a line of JSON. The end of the input ends all. While no command is there nobody takes processor time.
"""
import argparse
import datetime
import json
import sys

import torch
import torch.distributed as dist


def compile_blocks(model, *kinds):
    """Compiles a network block by block: every module of the classes named. A block that has been compiled serves all others of
    its class and shapes, so that it takes seconds where the whole network took minutes (PyTorch 2.11)."""
    torch._dynamo.config.recompile_limit = 256  # as many shapes as a network has
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise ValueError(f"no {' or '.join(kinds)} in {type(model).__name__}")
    for block in blocks:
        block.compile()
    return model


def channels_last(model):
    """Weights of 2D and 3D convolutions with the channels last."""
    for p in model.parameters():
        if p.dim() in (4, 5):
            p.data = p.data.contiguous(memory_format=torch.channels_last if p.dim() == 4 else torch.channels_last_3d)
    return model


def serve(doc, make):
    """make(case, rank, ranks) gives the work."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store", help="file that processes meet at; must not exist")
    args = parser.parse_args()
    with open(args.case, encoding="utf-8") as f:
        case = json.load(f)
    torch.set_num_threads(case["threads"])
    torch.manual_seed(args.rank)
    if args.store:  # of one process, too: DDP wants a group
        dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks,
                                timeout=datetime.timedelta(hours=1))
    work = make(case, args.rank, args.ranks)
    command = torch.zeros(1, dtype=torch.int64)
    if args.rank == 0:
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    while True:
        if args.rank == 0:
            line = sys.stdin.readline()
            command[0] = int(line) if line.strip() else 0
        if args.ranks > 1:
            dist.broadcast(command, 0)
        if command[0] == 0:
            break
        done = [work.run() for _ in range(int(command[0]))]
        if args.rank == 0:
            print(json.dumps({name: [d[name] for d in done] for name in done[0]}), flush=True)
    if args.store:
        dist.destroy_process_group()
