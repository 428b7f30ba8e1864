"""The W&B workspace and report of a study, as code: they are made anew from here, not clicked together.

python analysis/dashboard.py --entity ENTITY --study demo       # saves both and prints their addresses
python analysis/dashboard.py --dry-run                          # prints what would be saved, without a network
"""

import argparse
import json
import sys
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces import expr

from normlab import verdict
from normlab.journal import WANDB_NAMES

PLACEMENT, RATE = wr.Config("model.placement"), wr.Config("optim.lr")
LOSS, VAL_LOSS, GRAD_NORM, LR = (WANDB_NAMES[column] for column in ("loss", "val_loss", "grad_norm", "lr"))
LAYERS = r"^grad_norm/([a-z]+_)?layer_\d+$"  # an encoder-decoder's name their stack
DETECTORS = r"^spikes/(loss|grad_norm)_"  # z of each; events are a table
API_SECONDS = 20
SWEPT = ("model.depth", "model.placement", "model.norm", "model.activation", "optim.lr", "optim.warmup_steps")
Panels = dict[str, list[Any]]


def panels() -> Panels:
    """Section -> its panels. A line or bar is a placement; the band spans its runs."""
    over_runs: dict[str, Any] = {
        "groupby": PLACEMENT,
        "groupby_aggfunc": "mean",
        "groupby_rangefunc": "minmax",
        "x": "Step",
    }
    by_placement: dict[str, Any] = {"groupby": PLACEMENT, "orientation": "v"}
    nats: dict[str, Any] = {"title_x": "optimizer step", "title_y": "loss (nats)"}
    return {
        "Loss by placement": [
            wr.LinePlot(title="training loss", y=[LOSS], **over_runs, **nats),
            wr.LinePlot(title="validation loss", y=[VAL_LOSS], **over_runs, **nats),
            wr.LinePlot(title="learning rate", y=[LR], x="Step", title_x="optimizer step"),
        ],
        "Gradient norm by layer": [
            wr.LinePlot(title="gradient norm of each block (L2)", metric_regex=LAYERS, x="Step", log_y=True),
            wr.LinePlot(title="global gradient norm (L2)", y=[GRAD_NORM], log_y=True, **over_runs),
            wr.MediaBrowser(title="layer × step", media_keys=["grad_norm/heat_map"], num_columns=3),
        ],
        "Spikes": [
            wr.LinePlot(title="loss at spikes", y=[LOSS, "train/loss_spike"], x="Step", **nats),
            wr.LinePlot(title="detectors' z", metric_regex=DETECTORS, x="Step", title_y="spreads above the centre"),
            wr.BarPlot(title="spikes per run", metrics=["spike_count"], groupby_aggfunc="mean", **by_placement),
            wr.WeavePanelSummaryTable(table_name="spikes/events"),
        ],
        "Verdicts": [
            wr.BarPlot(
                title="runs by verdict",
                metrics=[f"verdict/{name}" for name in verdict.NAMES],
                groupby_aggfunc="sum",
                **by_placement,
            ),
        ],
        "Learning rate and what came of it": [
            wr.ScatterPlot(title="final loss by rate", x=RATE, y=wr.SummaryMetric("final_val_loss"), log_x=True),
            wr.ScatterPlot(title="spikes by rate", x=RATE, y=wr.SummaryMetric("spike_count"), log_x=True),
            wr.ParallelCoordinatesPlot(
                title="settings to final loss",
                columns=[
                    *(wr.ParallelCoordinatesPlotColumn(wr.Config(key), log=key == RATE.name) for key in SWEPT),
                    *(wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(k)) for k in ("spike_count", "final_val_loss")),
                ],
            ),
        ],
    }


def workspace(entity: str, project: str, study: str | None) -> ws.Workspace:
    """Runs grouped by study (W&B's group) and placement; of one study, if it is given."""
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"normlab: {study or 'all studies'}",
        sections=[ws.Section(name=name, panels=found, is_open=True) for name, found in panels().items()],
        settings=ws.WorkspaceSettings(x_axis="Step", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=[expr.Metric("Group") == study] if study else [],
            groupby=[expr.Metric("Group"), expr.Config(PLACEMENT.name)],
            pinned_columns=["summary:verdict", "summary:final_val_loss", "summary:spike_count"],
        ),
    )


def report(entity: str, project: str, study: str | None) -> wr.Report:
    """The workspace's panels under headings, each over the runs as they are when it is read."""
    chosen: dict[str, Any] = {"filters": [expr.Metric("Group") == study]} if study else {}
    blocks: list[Any] = [wr.TableOfContents()]
    for name, found in panels().items():
        # of the report's own project: a named one is looked up on the server, which a dry run must not need
        runs = wr.Runset(name=study or "all studies", groupby=["group", f"config.{PLACEMENT.name}"], **chosen)
        blocks += [wr.H1(name), wr.PanelGrid(runsets=[runs], panels=_side_by_side(found))]
    title = f"normlab: {study or 'all studies'}"
    about = "Every finished run counts; a verdict and its numbers are those of run.json."
    return wr.Report(entity=entity, project=project, title=title, description=about, blocks=blocks, width="fluid")


def _side_by_side(found: list[Any]) -> list[Any]:
    for i, panel in enumerate(found):
        panel.layout = wr.Layout(x=12 * (i % 2), y=8 * (i // 2), w=12, h=8)
    return found


def spec(entity: str, project: str, study: str | None) -> dict[str, Any]:
    """What would be sent to W&B."""
    made = {"workspace": workspace(entity, project, study), "report": report(entity, project, study)}
    return {name: thing._to_model().model_dump(mode="json", by_alias=True, exclude_none=True) for name, thing in
            made.items()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entity", help="W&B user or team; default: the account's own")
    parser.add_argument("--project", default="normlab", help="default: normlab")
    parser.add_argument("--study", help="only this study's runs; default: all of the project")
    parser.add_argument("--dry-run", action="store_true", help="print the spec as JSON, without a network")
    options = parser.parse_args()
    if options.dry_run:
        print(json.dumps(spec(options.entity or "ENTITY", options.project, options.study), indent=2))
        return 0
    try:
        entity = options.entity or wandb.Api(timeout=API_SECONDS).default_entity
        if not entity:
            raise ValueError("the account has no default entity; give --entity")
        print(workspace(entity, options.project, options.study).save().url)
        print(report(entity, options.project, options.study).save().url)
    except Exception as error:  # of many kinds: W&B's, HTTP's, GraphQL's
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"dashboard.py: not saved to W&B: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
