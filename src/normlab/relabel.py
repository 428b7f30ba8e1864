"""Other rules for runs that are over: spikes and verdict again, from what was logged.

Rules have the shape of run.json's `detector`: {"version", "spikes": {name: rule}, "judge": name, "verdict": {...}}.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeGuard

import pandas as pd

from normlab import verdict
from normlab.spikes import Rule, leads, log_norm, read, share_beyond

RULE_NAMES = ("olmo", "olmo_core", "mad")
_RULE_KEYS = {"centre": str, "kappa": float, "window": int, "min_history": int, "min_height": float}
_VERDICT_KEYS = {"stalled_below": float, "rise": float, "patience": int}
_BLAME = ("first_bad_stack", "first_bad_layer", "first_bad_layer_why")
_COLUMNS = (
    *("study", "run_id", "path", "old_verdict", "verdict", "old_reason", "reason"),
    *("old_first_bad_step", "first_bad_step", "old_spike_count", "spike_count", "note", "fields"),
)


def relabel(runs: pd.DataFrame, steps: pd.DataFrame, rules: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """One row per finished trained run: its verdict as recorded (old_...) and under its own stored rules, on which
    `rules` (any part of that shape) are laid.

    `fields` is what run.json would say, None where the run keeps its label; `note` says why. Raises ValueError for
    rules that make no sense.
    """
    check(rules or {})
    rows: list[dict[str, Any]] = []
    if len(runs):
        logged = dict(iter(steps.groupby(["study", "run_id"], observed=True)))
        for _, run in runs[(runs.status == "finished") & (runs.steps > 0)].iterrows():
            mine = logged.get((run.study, run.run_id))
            rows += [_row(run.to_dict(), steps.iloc[:0] if mine is None else mine.sort_values("step"), rules or {})]
    counts = ["old_first_bad_step", "first_bad_step", "old_spike_count", "spike_count"]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(dict.fromkeys(counts, "Int64"))


def _row(run: dict[str, Any], steps: pd.DataFrame, rules: Mapping[str, Any]) -> dict[str, Any]:
    old = {key: _known(run.get(key)) for key in ("verdict", "reason", "first_bad_step", "spike_count")}
    row = {key: run[key] for key in ("study", "run_id", "path")} | {f"old_{key}": value for key, value in old.items()}
    stored = run.get("detector")
    stored = stored if _is_current(stored) else {}
    laid = overlaid(stored, rules)
    kept = None
    if not _is_complete(laid):
        kept = "older record, without rules of its own: keeps its label"
    elif len(steps) != run.get("steps_done"):
        kept = f"{len(steps)} of {run.get('steps_done')} steps are logged: keeps its label"
    elif (
        run.get("stopped") == "hopeless"
        and verdict.hopeless(
            steps.loss.tolist(), _number(run["init_val_loss"]), laid["verdict"]["rise"], laid["verdict"]["patience"]
        )
        is None
    ):
        kept = "stopped early as hopeless by other rules: keeps its label"
    if kept:
        return row | old | {"note": kept, "fields": None}
    fields = judged(
        laid,
        losses=steps.loss.tolist(),
        grad_norms=steps.grad_norm.tolist(),
        loss_scales=steps.loss_scale.fillna(1.0).tolist() if "loss_scale" in steps else None,
        steps=int(run["steps"]),
        warmup_steps=int(run["optim.warmup_steps"]),
        **{key: _number(run[key]) for key in ("init_val_loss", "final_val_loss", "h1", "h2")},
    )
    bad = fields["first_bad_step"]
    fields["first_bad_lr"] = None if bad is None else float(steps.lr.iloc[bad])
    if bad != old["first_bad_step"]:  # the block that was blamed belongs to the old step
        fields |= {key: None for key in _BLAME if key in run}
    version, now = stored.get("version", 1), verdict.RULES_VERSION
    note = "" if version == now else f"judged by rules of version {version}, now of {now}"
    return row | {key: fields[key] for key in old} | {"note": note, "fields": fields}


def judged(
    rules: Mapping[str, Any],
    *,
    losses: Sequence[float],
    grad_norms: Sequence[float],
    steps: int,
    warmup_steps: int,
    init_val_loss: float,
    final_val_loss: float,
    h1: float,
    h2: float,
    loss_scales: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The part of run.json that the rules decide, of a run of so many planned `steps`."""
    events, counts, scores = {}, {}, {}
    least: dict[str, int] = {}
    for name, values in rules["spikes"].items():
        rule = Rule(**values)
        least[name] = rule.for_run(steps).min_history
        for series, its, numbers in (
            ("loss", rule.for_run(steps), losses),
            ("grad_norm", rule.for_run(steps).for_norms(), [log_norm(g) for g in grad_norms]),
        ):
            events[series, name], z = read(numbers, its)
            label = f"{series}_{rule.label(name, steps)}"
            counts[label] = len(events[series, name])
            share = share_beyond(z[warmup_steps:], its.kappa)
            scores[label] = None if math.isnan(share) else share
    judge = rules["judge"]
    found = events["loss", judge]
    first = leads(found, events["grad_norm", judge])
    label = verdict.judge(
        losses=losses,
        grad_norms=grad_norms,
        loss_scales=loss_scales,
        init_val_loss=init_val_loss,
        final_val_loss=final_val_loss,
        h1=h1,
        h2=h2,
        spikes=found,
        spike_patience=least[judge],
        **{key: rules["verdict"][key] for key in _VERDICT_KEYS},
    )
    return {
        **asdict(label),
        "spike_count": len(found),
        "spikes": [asdict(s) | {"duration": s.duration, "lead": lead} for s, lead in zip(found, first, strict=True)],
        "spike_counts": counts,
        "spike_scores": scores,
        "detector": dict(rules),
    }


def parse(overrides: Iterable[str]) -> dict[str, Any]:
    """Rules from spikes.NAME.KEY=VALUE, judge=NAME and verdict.KEY=VALUE. Raises ValueError naming what is wrong."""
    rules: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        match key.removeprefix("spikes.").split("."):
            case ["judge"]:
                rules["judge"] = text
            case ["verdict", last]:
                rules.setdefault("verdict", {})[last] = _value(key, text, _type(key, last, _VERDICT_KEYS))
            case [name, last] if key.startswith("spikes."):
                value = _value(key, text, _type(key, last, _RULE_KEYS))
                rules.setdefault("spikes", {}).setdefault(name, {})[last] = value
            case _:
                raise ValueError(f"{key}: accepted: spikes.NAME.KEY, spikes.judge, verdict.KEY")
    check(rules)
    return rules


def check(rules: Mapping[str, Any]) -> None:
    """Raise ValueError for a part of rules with an unknown name, or a value that no rules could take."""
    for name, values in rules.get("spikes", {}).items():
        if name not in RULE_NAMES:
            raise ValueError(f"spikes.{name}: accepted: {', '.join(RULE_NAMES)}")
        for key in values:
            _type(f"spikes.{name}.{key}", key, _RULE_KEYS)
    if rules.get("judge", RULE_NAMES[0]) not in RULE_NAMES:
        raise ValueError(f"spikes.judge={rules['judge']}: accepted: {', '.join(RULE_NAMES)}")
    limits = {"stalled_below": (0, 1), "rise": (0, math.inf), "patience": (1, math.inf)}
    for key, (low, high) in limits.items():
        value = rules.get("verdict", {}).get(key)
        if value is not None and not low <= value <= high:
            told = f"{low} to {high}" if math.isfinite(high) else f"{low} or more"
            raise ValueError(f"verdict.{key}={value}: accepted: {told}")


def overlaid(stored: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """`stored` with any part of it replaced, as rules of this version. Raises ValueError for a rule of no sense."""
    spikes = {name: dict(values) for name, values in stored.get("spikes", {}).items()}
    for name, values in rules.get("spikes", {}).items():
        spikes[name] = spikes.get(name, {}) | dict(values)
    for name, values in spikes.items():
        if set(values) == set(_RULE_KEYS):
            try:
                Rule(**values)
            except ValueError as error:
                raise ValueError(f"spikes.{name}.{error}") from None
    return {
        "version": verdict.RULES_VERSION,
        "spikes": spikes,
        "judge": rules.get("judge", stored.get("judge")),
        "verdict": dict(stored.get("verdict", {})) | dict(rules.get("verdict", {})),
    }


def _is_current(stored: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(stored, Mapping) and {"version", "spikes", "judge", "verdict"} <= set(stored)


def _is_complete(rules: Mapping[str, Any]) -> bool:
    whole = all(set(values) == set(_RULE_KEYS) for values in rules["spikes"].values())
    return whole and rules["judge"] in rules["spikes"] and set(_VERDICT_KEYS) <= set(rules["verdict"])


def _type(told: str, key: str, accepted: Mapping[str, type]) -> type:
    if key not in accepted:
        raise ValueError(f"{told}: accepted: {', '.join(told[: -len(key)] + name for name in accepted)}")
    return accepted[key]


def _value(key: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{key}={text}: accepted: {'a whole number' if kind is int else 'a number'}") from None


def _known(value: Any) -> Any:
    """None for what pandas has made a NaN of; whole numbers as such."""
    if value is None or value != value:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
