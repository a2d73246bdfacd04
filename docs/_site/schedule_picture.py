"""Draws the moving schedule of the front page, an SVG of a few kilobytes: ``python docs/_site/schedule_picture.py``.

It has no background, and its grey is legible on white and on black. Where the reader wants no motion, it shows the whole step.
"""

import pathlib

from jaxpp.schedule import Kind, Simulation, make, simulate

TARGET = pathlib.Path(__file__).parents[1] / "assets" / "schedule.svg"
WIDTH, LEFT, TOP, ROW, BAR = 390, 52, 26, 30, 26
SECONDS, PAUSE = 0.25, 2.0  # for a unit of time; at the end
COLOURS = {Kind.F: ("#0072b2", "#ffffff"), Kind.B: ("#e69f00", "#000000")}
WORDS = {Kind.F: "forward", Kind.B: "backward"}


def picture(run: Simulation) -> str:
    """A step of a schedule as it passes, over and over."""
    unit, whole = (WIDTH - LEFT - 2) / run.makespan, SECONDS * run.makespan + PAUSE
    bottom = TOP + ROW * run.schedule.num_ranks

    def percent(time: float) -> str:
        return f"{100 * SECONDS * time / whole:.4g}%"

    rules = {  # each bar grows while its action runs
        f"b{bar.start:g}-{bar.end:g}": f"0%,{percent(bar.start)}{{transform:scaleX(0)}}{percent(bar.end)},to{{transform:none}}"
        for bar in run.bars
    }
    rules["now"] = f"0%{{transform:none}}{percent(run.makespan)},to{{transform:translateX({unit * run.makespan:.1f}px)}}"
    parts = []
    for kind, x in zip(COLOURS, (LEFT, LEFT + 90), strict=True):
        parts.append(f'<rect x="{x}" y="4" width="14" height="12" fill="{COLOURS[kind][0]}"/>')
        parts.append(f'<text x="{x + 20}" y="14">{WORDS[kind]}</text>')
    parts.append(f'<text x="{LEFT + 190}" y="14">numbers: microbatches</text>')
    for rank in range(run.schedule.num_ranks):
        y = TOP + ROW * rank
        parts.append(f'<text x="0" y="{y + 17}">device {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 2}" height="{BAR}" fill="#808080" fill-opacity=".16"/>')
    for bar in run.bars:
        fill, ink = COLOURS[bar.action.kind]
        x, y, wide = LEFT + unit * bar.start, TOP + ROW * bar.rank, unit * (bar.end - bar.start)
        parts.append(
            f'<g style="animation-name:b{bar.start:g}-{bar.end:g}">'
            f'<rect x="{x:.1f}" y="{y}" width="{wide - 0.8:.1f}" height="{BAR}" fill="{fill}"/>'
            f'<text class="n" style="fill:{ink}" x="{x + wide / 2:.1f}" y="{y + 17}">{bar.action.microbatch}</text></g>'
        )
    now = f'<path class="now" d="M{LEFT} {TOP - 3}V{bottom}" style="animation-name:now"/>'
    moves = "".join(f"@keyframes {name}{{{frames}}}" for name, frames in rules.items())
    style = (
        "text{font:11px system-ui,sans-serif;fill:#74828d}text.n{text-anchor:middle}.now{stroke:#74828d}"
        f"g,.now{{animation:{whole:g}s linear infinite;transform-box:fill-box;transform-origin:left}}"
        "@media(prefers-reduced-motion){g,.now{animation:none}.now{display:none}}"
    )
    drawing = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" role="img">\n'
        f"<title>{run.schedule.name} on {run.schedule.num_ranks} devices</title>\n"
        f"<style>{style}{moves}</style>\n{drawing}\n{now}\n</svg>\n"
    )


def front_page() -> str:
    """The picture of the front page."""
    return picture(simulate(make("1f1b", num_ranks=4, num_microbatches=6)))


if __name__ == "__main__":
    TARGET.write_text(front_page())
