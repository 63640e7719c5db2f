#!/usr/bin/env python3
"""Writes swebench_mini.jsonl and repos/*.bundle; the same bytes on every run and machine.

    python3 data/generate.py [--out data]
"""

import argparse
import json
import os

from mini.instances import build
from mini.split import HELDOUT, TRAIN
from mini.tasks import heldout_tasks, train_tasks, warm_start_tasks


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=here, help="folder to write to (default: the folder of this script)")
    out = parser.parse_args().out

    train = train_tasks()
    heldout = heldout_tasks(warm_start_tasks() + train)
    lines, bundles = build({TRAIN: train, HELDOUT: heldout}, "repos")

    os.makedirs(os.path.join(out, "repos"), exist_ok=True)
    for name, bundle in bundles.items():
        bundle.write(os.path.join(out, "repos", name))
    with open(os.path.join(out, "swebench_mini.jsonl"), "w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    print(f"{len(train)} training and {len(heldout)} held-out tasks in {len(bundles)} bundles")


if __name__ == "__main__":
    main()
