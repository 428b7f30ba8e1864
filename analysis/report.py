"""Every figure and table that the given runs allow, and a self-contained index.html.

python analysis/report.py runs/demo runs/init_profile runs/xiong_depth
"""

import argparse
import base64
import html
import sys
from pathlib import Path

import pandas as pd

import arms
import claims
import fig_activation
import fig_activation_heatmap
import fig_angular_distance
import fig_attention_logits
import fig_batchnorm
import fig_depth_placement
import fig_final_norm
import fig_gradient_decay
import fig_gradient_heatmap
import fig_gradient_profile
import fig_hidden_growth
import fig_init_gradients
import fig_jacobian
import fig_loss_curves
import fig_lr_frontier
import fig_lr_sensitivity
import fig_norm_cost
import fig_norm_type
import fig_precision
import fig_qk_norm
import fig_residual_ablation
import fig_sine
import fig_spike_sensitivity
import fig_spikes
import fig_survival
import fig_translation_warmup
import fig_update_ratio
import fig_warmup
import fig_xiong_depth
import fig_xiong_gradients
import fig_xiong_warmup
import figure
import findings
from arms import Missing
from figure import Drawn
from normlab.results import Results

FIGURES = (
    fig_xiong_warmup,
    fig_loss_curves,
    fig_depth_placement,
    fig_survival,
    fig_warmup,
    fig_lr_sensitivity,
    fig_residual_ablation,
    fig_final_norm,
    fig_lr_frontier,
    fig_spikes,
    fig_spike_sensitivity,
    fig_gradient_heatmap,
    fig_gradient_profile,
    fig_update_ratio,
    fig_activation_heatmap,
    fig_angular_distance,
    fig_attention_logits,
    fig_qk_norm,
    fig_xiong_gradients,
    fig_xiong_depth,
    fig_hidden_growth,
    fig_gradient_decay,
    fig_jacobian,
    fig_translation_warmup,
    fig_init_gradients,
    fig_norm_type,
    fig_activation,
    fig_precision,
    fig_batchnorm,
    fig_sine,
    fig_norm_cost,
)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
figure {{ margin: 0 0 1rem; }} img {{ max-width: 100%; height: auto; }}
figcaption, .note {{ color: #555; font-size: .9rem; }}
table {{ border-collapse: collapse; font-size: .9rem; }} .scroll {{ overflow-x: auto; }}
th, td {{ padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #e2e2e2; white-space: nowrap; }}
th.text, td.text {{ text-align: left; }}
td.wide {{ white-space: normal; min-width: 16rem; vertical-align: top; }}
td.bad {{ color: #a33b00; font-weight: 600; }}
li {{ margin: .3rem 0; }}
</style></head><body>
{body}
</body></html>
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help=figure.RUNS)
    parser.add_argument("--name", help="report/NAME/index.html; default: the first folder's name")
    parser.add_argument("--figures", type=Path, default=figure.ROOT / "figures", help="default: figures/")
    parser.add_argument("--out", type=Path, default=figure.ROOT / "report", help="default: report/")
    options = parser.parse_args()
    try:
        every = arms.load(options.runs, once=False)
    except (FileNotFoundError, ConnectionError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    data = arms.counted_once(every)
    if data.runs.empty:
        print(f"report.py: no run with a readable record below {', '.join(options.runs)}", file=sys.stderr)
        return 2
    name = options.name or Path(options.runs[0]).resolve().name
    page = options.out / name / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(write(data, name, options.figures, every))

    for sentence in findings.sentences(data):
        print(f"- {sentence}")
    print(f"\n{findings.summary(data.runs).to_string(index=False)}\n\nreport: {page}")
    return 0


def write(data: Results, name: str, figures: Path, every: Results | None = None) -> str:
    """Draw what can be drawn into `figures`, and return the page. every: with runs that are in several studies."""
    parts = [
        f"<h1>normlab report: {html.escape(name)}</h1>",
        f'<p class="note">{html.escape(provenance(data.runs))}</p>',
    ]
    parts += ["<h2>What was found</h2>", "<ul>"]
    parts += [f"<li>{html.escape(s)}</li>" for s in findings.sentences(data)]
    parts += ["</ul>", "<h2>Runs</h2>", table(findings.summary(data.runs))]
    if (data.runs.get("verdict") == "diverged").any():
        parts += ['<p class="note">A diverged seed enters a mean with its loss at initialisation.</p>']
    ledger = claims.ledger(every or data)
    measured = ledger[ledger.verdict != "not measured"]
    if len(measured):
        parts += [f"<h2>Claims: {len(measured)} of {len(ledger)} are measured by these runs</h2>", claimed(measured)]
    missing = []
    for module in FIGURES:
        title = (module.__doc__ or "").splitlines()[0]
        try:
            drawn: Drawn = module.draw(data)
            png = figure.save(drawn, module.STEM, figures)
        except Missing as reason:
            missing.append(f"{module.STEM}: {reason}")
            continue
        except Exception as error:  # one figure that breaks must not take the page with it
            missing.append(f"{module.STEM}: could not be drawn: {type(error).__name__}: {error}")
            continue
        encoded = base64.b64encode(png.read_bytes()).decode()
        parts += [
            f'<h2 id="{module.STEM}">{html.escape(title)}</h2>',
            f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{encoded}">',
            f"<figcaption>{html.escape(drawn.caption)} Data: {module.STEM}.csv</figcaption></figure>",
        ]
    left_out = data.runs[data.runs.status != "finished"]
    notes = missing + [f"{r.study}/{r.run_id} is {r.status}: {r.get('reason')}" for _, r in left_out.iterrows()]
    notes += data.runs.attrs["skipped"]
    if notes:
        parts += ["<h2>Not shown, and why</h2>", "<ul>", *(f"<li>{html.escape(n)}</li>" for n in notes), "</ul>"]
    return PAGE.format(title=html.escape(f"normlab: {name}"), body="\n".join(parts))


def table(summary: pd.DataFrame) -> str:
    """The summary as HTML; verdicts other than all-stable stand out."""
    texts = {c: ' class="text"' for c in summary.columns if c in {"placement", "verdict"}}
    heads = "".join(f"<th{texts.get(c, '')}>{html.escape(str(c))}</th>" for c in summary.columns)
    rows = []
    for _, row in summary.iterrows():
        bad = row.get("verdict", "stable") != "stable"
        styles = texts | ({"verdict": ' class="text bad"'} if bad else {})
        cells = [f"<td{styles.get(str(c), '')}>{html.escape(str(v))}</td>" for c, v in row.items()]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'


def claimed(ledger: pd.DataFrame) -> str:
    """The ledger's rows as HTML: claim and rule, verdict, number."""
    rows = []
    for _, row in ledger.iterrows():
        name = row.figure.removeprefix("fig_")
        told = [row.id, row.claim, row.verdict, claims.number_told(row), row.note]
        who, claim, verdict, number, note = (html.escape(str(t)) for t in told)
        link = f'<a href="#{name}">{who}</a>' if name else who
        bad = " bad" if verdict == "contradicted" else ""
        rows.append(
            f'<tr><td class="text">{link}</td><td class="text wide">{claim}<br><span class="note">Rule: '
            f'{html.escape(row.rule)}</span></td><td class="text{bad}">{verdict}</td>'
            f'<td class="text wide">{number}<br><span class="note">{note}</span></td></tr>'
        )
    heads = "".join(f'<th class="text">{h}</th>' for h in ("", "claim", "verdict", "number"))
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'


def provenance(runs: pd.DataFrame) -> str:
    """How many runs of what, by which code, on what."""
    commits = [str(c)[:10] for c in runs.git_commit.dropna().unique()]
    mixed = " (MIXED source revisions: compare with care)" if len(commits) > 1 else ""
    dirty = " with local changes" if runs.git_dirty.fillna(value=False).astype(bool).any() else ""
    torch = ", ".join(sorted(runs["packages"].map(lambda p: p["torch"]).unique()))
    code = f"commit {', '.join(commits) or 'unknown'}{dirty}{mixed}"
    return (
        f"{len(runs)} runs of {', '.join(runs.study.unique())}; {code}; "
        f"torch {torch}; {', '.join(runs.device.unique())} ({', '.join(runs.machine.unique())})."
    )


if __name__ == "__main__":
    sys.exit(main())
