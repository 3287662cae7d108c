"""A process of its own that holds the GPU and keeps it busy, until its input ends."""

from __future__ import annotations

import sys
import threading

import torch


def main() -> None:
    work = torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
    print("works", flush=True)
    while not ended.is_set():
        for _ in range(20):
            work = (work @ work) / 1024
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
