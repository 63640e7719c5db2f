#!/usr/bin/env python3
"""Does a policy get better? Trains the bundled policy on several seeds and once with shuffled rewards.

    python3 benches/learning.py [--seeds 1 2 3] [--output-dir runs/learning] [--write-docs]

Prints one row a run and checks the spine's criterion: at temperature 1 the held-out solve rate rises by at
least 20 points on each seed, the greedy one by at least 4 on average, and the control, whose rewards are
shuffled among trials, gains less than 6. Exit code 1 if not. `--write-docs` writes docs/learning.md and its
curves. A finished run in the output folder is read, not repeated.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def train(name, seed, is_control, output_dir):
    """Runs `lego train` (or reads what a finished run left) and returns its report."""
    folder = output_dir / name
    report = folder / "reports" / "report.json"
    if not report.exists():
        command = [
            str(ROOT / "target/release/lego"), "train", "--dataset", "data/swebench_mini.jsonl",
            "--seed", str(seed), "--output-dir", str(folder),
        ]
        if is_control:
            config = output_dir / "control.toml"
            text = (ROOT / "train.toml").read_text()
            config.write_text(text.replace("[training]\n", "[training]\nshuffle_rewards = true\n", 1))
            command += ["--config", str(config)]
        if (folder / "run.json").exists():
            command.append("--resume")
        subprocess.run(command, cwd=ROOT, check=True)
    return json.loads(report.read_text())


def percent(value):
    return "-" if value is None else f"{100 * value:.1f}"


def row(name, report):
    before, after = report["evaluation_before"]["rates"], report["evaluation_after"]["rates"]
    lift = 100 * (after["solve_rate"] - before["solve_rate"])
    greedy = 100 * (after["greedy"] - before["greedy"])
    cells = [
        name,
        f"{percent(before['solve_rate'])} -> {percent(after['solve_rate'])}", f"{lift:+.1f}",
        f"{percent(before['greedy'])} -> {percent(after['greedy'])}", f"{greedy:+.1f}",
        f"{percent(before['pass_at_k'])} -> {percent(after['pass_at_k'])}",
        str(report["max_logprob_diff"]), str(report["steps"]), f"{report['wall_seconds']:.0f}",
    ]
    return lift, greedy, "| " + " | ".join(cells) + " |"


HEAD = (
    "| run | solve rate, T=1 (%) | lift | greedy (%) | lift | pass@4 (%) | max log-prob diff | steps | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def families(reports):
    """Held-out solve rate at temperature 1 by bug family, before and after, mean over the seeds."""
    names = sorted(reports[0]["evaluation_before"]["by_family"])
    lines = ["| bug family | tasks | T=1 before | T=1 after | greedy before | greedy after |", "|---|---|---|---|---|---|"]

    def mean(which, name, key):
        return sum(report[which]["by_family"][name][key] for report in reports) / len(reports)

    for name in names:
        tasks = reports[0]["evaluation_before"]["by_family"][name]["tasks"]
        cells = [name, str(tasks)] + [
            percent(mean(which, name, key))
            for key in ("solve_rate", "greedy")
            for which in ("evaluation_before", "evaluation_after")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curves(runs):
    """The share of solved training trials by step, smoothed over 5 steps, as one SVG."""
    width, height, left, bottom = 640, 300, 46, 34
    colours = ["#1b6ca8", "#2a9d8f", "#7b5ea7", "#c44536"]
    last = max(point["step"] for _, report in runs for point in report["train_curve"])
    x = lambda step: left + (width - left - 110) * step / last
    y = lambda share: 10 + (height - bottom - 10) * (1 - share)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in range(0, 101, 20):
        out.append(f'<line x1="{left}" x2="{width - 110}" y1="{y(tick / 100):.1f}" y2="{y(tick / 100):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y(tick / 100) + 4:.1f}" text-anchor="end">{tick}%</text>')
    for tick in range(0, last + 1, max(1, last // 6)):
        out.append(f'<text x="{x(tick):.1f}" y="{height - 14}" text-anchor="middle">{tick}</text>')
    out.append(f'<text x="{(left + width - 110) / 2}" y="{height - 1}" text-anchor="middle">optimizer step</text>')
    for index, (name, report) in enumerate(runs):
        rates = [point["solve_rate"] for point in report["train_curve"]]
        smooth = [sum(rates[max(0, i - 4):i + 1]) / len(rates[max(0, i - 4):i + 1]) for i in range(len(rates))]
        points = " ".join(
            f"{x(point['step']):.1f},{y(rate):.1f}" for point, rate in zip(report["train_curve"], smooth)
        )
        colour = colours[index % len(colours)]
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        out.append(f'<text x="{width - 100}" y="{24 + 18 * index}" fill="{colour}">{name}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output-dir", type=pathlib.Path, default=ROOT / "runs/learning")
    parser.add_argument("--write-docs", action="store_true")
    args = parser.parse_args()
    output_dir = args.output_dir.resolve()
    output_dir.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cargo", "build", "--release", "--quiet"], cwd=ROOT, check=True)

    runs = [(f"seed {seed}", train(f"seed-{seed}", seed, False, output_dir)) for seed in args.seeds]
    control = ("control (rewards shuffled)", train("control", args.seeds[0], True, output_dir))
    table, lifts, greedy_lifts = [HEAD], [], []
    for name, report in runs:
        lift, greedy, text = row(name, report)
        lifts.append(lift)
        greedy_lifts.append(greedy)
        table.append(text)
    control_lift, _, text = row(*control)
    table.append(text)
    table = "\n".join(table)
    print(table)

    checks = [
        (min(lifts) >= 20, f"smallest lift at temperature 1: {min(lifts):+.1f} points (at least 20)"),
        (sum(greedy_lifts) / len(greedy_lifts) >= 4,
         f"mean greedy lift: {sum(greedy_lifts) / len(greedy_lifts):+.1f} points (at least 4)"),
        (control_lift < 6, f"control: {control_lift:+.1f} points (less than 6)"),
        (all(report["max_logprob_diff"] == 0 for _, report in runs), "captured = recomputed log-probs, to the bit"),
    ]
    for passed, text in checks:
        print(("ok    " if passed else "FAILED"), text)
    if args.write_docs:
        svg = curves([(name.split(" (")[0], report) for name, report in [*runs, control]])
        (ROOT / "docs/learning.svg").write_text(svg)
        page = ROOT / "docs/learning.md"
        marker = "<!-- measured -->"
        text = page.read_text()
        head, _, rest = text.partition(marker)
        _, _, tail = rest.partition(marker)
        page.write_text(
            f"{head}{marker}\n\n{table}\n\n![Training solve rate by step](learning.svg)\n\n"
            f"{families([report for _, report in runs])}\n\n{marker}{tail}"
        )
    return 0 if all(passed for passed, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
