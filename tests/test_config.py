"""The door: what is accepted, what is refused, and how that is told."""

import inspect
from typing import get_args

import pytest
import yaml
from conftest import ROOT, compose
from omegaconf import OmegaConf
from pairs import REST, write

from normlab import cli, composing, config, config_data, config_model, store, verdict
from normlab.config import load
from normlab.explain import ConfigError
from normlab.init import INITS
from normlab.optim import OPTIMIZERS, SCHEDULES
from normlab.pack_launch import train
from normlab.residual import PLACEMENTS


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.dept=24", r"model\.dept: unknown key; did you mean model\.depth"),
        ("+optim.learning_rate=1e-3", r"optim\.learning_rate=0\.001: unknown key; accepted: optim\.name, optim\.lr"),
        ("+model.pre_norm=true", r"model\.pre_norm=True: unknown key"),
        ("+sede=3", r"sede=3: unknown key; did you mean seed"),
        ("model.placement=pst", r"model\.placement='pst': accepted: pre, post, .*did you mean post"),
        ("model.placement=off", r"model\.placement='off': accepted: pre, post"),
        ("model.heads=5", r"model\.heads=5 must divide model\.width=64"),
        ("optim.lr=-1", r"optim\.lr=-1: .*greater than 0"),
        ("optim.lr=nan", r"optim\.lr=nan: .*finite"),
        ("'optim.lr=\"1e-4\"'", r"optim\.lr='1e-4': .*valid number"),
        ("seed=01", r"seed='01': .*valid integer"),
        ("optim.clip=None", r"optim\.clip='None': .*valid number, or null for none"),
        ("optim.clip=none", r"optim\.clip='none': .*or null"),
        ("optim.clip=", r"optim\.clip='': .*or null"),
        ("optim.clip=0", r"optim\.clip=0: .*greater than 0, or null"),
        ("optim.clip=-1", r"optim\.clip=-1: .*greater than 0"),
        ("optim.clip=nan", r"optim\.clip=nan: .*greater than 0"),
        ("data.path=/no/such/file", r"data\.path='/no/such/file': no such file or folder"),
        ("data=fairy", r"data/fairy.*markov"),
        ("optim.warmup_steps=301", r"optim\.warmup_steps=301 is longer than the run: at most steps=300"),
        ("study=a/b", r"study='a/b'"),
        ("device=tpu", r"device='tpu': accepted: auto, cpu, cuda"),
        ("precision=int4", r"precision='int4': .*'fp32', 'bf16' or 'fp16'"),
        ("model.depth=???", r"Missing mandatory value: .*model\.depth"),
        ("model.depth=2,4", r"model\.depth: a list of choices; add -m"),
        ("+sweeps=nothing", r"sweeps/nothing"),
        ("model.depth=[1", r"."),
    ],
)
def test_a_mistake_is_one_line_that_names_it(override, told):
    with pytest.raises(ConfigError, match=told) as caught:
        cli.check(ROOT, [override.strip("'")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["no", "off", "none"])
def test_a_word_that_yaml_takes_for_a_truth_value_is_refused_like_the_word(word):
    """In a file `off` is false, on the command line it is text; `none` is a placement in both."""
    settings = compose().model_dump(mode="json")
    settings["model"] |= yaml.safe_load(f"placement: {word}")
    raw = OmegaConf.create(settings)
    if word == "none":
        assert load(raw).model.placement == compose(f"model.placement={word}").model.placement
        return
    for wrong in (lambda: load(raw), lambda: compose(f"model.placement={word}")):
        with pytest.raises(ConfigError, match=r"model\.placement=.*accepted: pre, post"):
            wrong()


def test_a_bad_value_deep_in_a_sweep_is_found_before_it_starts():
    with pytest.raises(ConfigError, match=r"model\.heads=3 must divide"):
        cli.check(ROOT, ["-m", "model.depth=2,4", "model.heads=1,2,3", "log=disabled"])


@pytest.mark.parametrize("value", ["1e-4", "0.0001", "1E-4", ".1e-3"])
def test_every_way_to_write_a_rate_is_the_same_number(value):
    assert compose(f"optim.lr={value}").optim.lr == 1e-4


@pytest.mark.parametrize(("value", "clip"), [("null", None), ("1", 1.0), ("0.5", 0.5), ("inf", float("inf"))])
def test_clip(value, clip):
    assert compose(f"optim.clip={value}").optim.clip == clip


def names(folder: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / folder).glob("*.yaml"))


@pytest.mark.parametrize("group", ["model", "data", "optim", "log", "experiment"])
def test_every_file_of_conf_composes(group):
    for name in names(f"conf/{group}"):
        assert compose(f"{group}={name}")


@pytest.mark.parametrize("name", names("sweeps"))
def test_every_sweep_composes_and_later_overrides_replace_its_grid(name, tmp_path):
    where = []
    if compose(f"+sweeps={name}").data.name == "parallel":  # whose text the user has
        names = {"data.valid_source": "valid.de", "data.valid_target": "valid.en"}
        names |= {"data.test_source": "test.de", "data.test_target": "test.en"}
        where = [f"data.path={write(tmp_path)}", f"data.cache={tmp_path}", *(f"{k}={v}" for k, v in names.items())]
    cli.check(ROOT, [f"+sweeps={name}", *where])
    cfg = compose(f"+sweeps={name}")
    assert cfg.study == name  # stem rule


def test_a_sweep_expands_to_its_grid_with_the_overrides_that_follow():
    with composing.conf(ROOT):
        jobs = composing.expand(["+sweeps=demo", "model.depth=2,3,4"])
    assert len(jobs) == 3 * 2 * 2
    assert sorted({o for job in jobs for o in job if "depth" in o}) == [f"model.depth={d}" for d in (2, 3, 4)]


def test_an_experiment_is_a_small_delta_with_its_question():
    for path in (ROOT / "conf/experiment").glob("*.yaml"):
        lines = [x for x in path.read_text().splitlines() if x.strip()]
        assert len([x for x in lines if not x.startswith("#")]) <= 15
        assert "Question:" in path.read_text()
        assert "Command:" in path.read_text()


def test_config_is_frozen():
    cfg = compose()
    with pytest.raises(ValueError, match="frozen"):
        cfg.model.depth = 3


def test_every_key_is_read(tmp_path, monkeypatch):
    """A key that nothing reads is worse than no key: real runs of every kind access each field of each section."""
    read: set[tuple[str, str]] = set()

    def recording(self, name):
        if name in type(self).model_fields:
            read.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    (tmp_path / "some.txt").write_bytes(b"some text " * 2000)
    small = ["model.depth=1", "model.width=8", "model.heads=1", "model.context=8", "steps=2", f"runs_dir={tmp_path}"]
    text = [f"data.path={tmp_path}", "data.glob=*.txt", "optim=sgd", "optim.schedule=cosine"]
    once = compose(*small, "data=markov", "log=offline")
    wide = ["model.head_width=8", "model.position=rotary", "model.ffn=moe", "model.init=completep", "log=disabled"]
    cfgs = [once, once, compose(*small, *text, "log=disabled", "study=other")]
    bad = ["optim=sgd", "optim.lr=1e9", "model.placement=none", "stop.hopeless=true", "log=disabled"]
    cfgs += [compose(*small, "data=markov", *bad, "steps=9", "log.every=1")]
    cfgs += [compose(*small, "data=markov", *wide, "model.arch=encoder_decoder", "model.position=rotary")]
    write(tmp_path / "pairs")
    pairs = [
        "data=parallel",
        f"data.path={tmp_path / 'pairs'}",
        "model.arch=encoder_decoder",
        *REST,
        "data.bleu_every=1",
    ]
    cfgs += [compose(*small, *pairs, f"data.cache={tmp_path}", "objective=translation", "model.context=48")]
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(bytes(400))
    cfgs += [compose(*small, "data=tokens", f"data.path={tmp_path}", "log=disabled")]
    road = ["data.dataset=text", f"data.files={tmp_path}/some.txt", f"data.cache={tmp_path}", "data.val_fraction=0.5"]
    (tmp_path / "some.txt").write_text("some text\n" * 2000)
    cfgs += [compose(*small, "data=hf", *road, "log=disabled"), compose(*small, "data=hf", *road, "data.val_split=x")]
    cfgs += [compose(*small, "data=sine", "log=disabled")]
    monkeypatch.setattr(config.Section, "__getattribute__", recording)
    for cfg in cfgs:
        cli.report(cfg, train(cfg))
    record = train(cfgs[2])
    for status in ("failed", "interrupted"):
        store.write_record(tmp_path / "other" / record["run_id"], record | {"status": status})
        record = train(cfgs[2])
    found = [*vars(config).values(), *vars(config_data).values()]
    sections = {s for s in found if isinstance(s, type) and issubclass(s, config.Section)} - {config_data.Windows}
    fields = {(s.__name__, name) for s in sections for name in s.model_fields}
    told_apart_by_type = {(f"{kind}Config", "name") for kind in ("Text", "Markov", "Tokens", "Hf", "Sine")}
    passed_whole = {("VerdictConfig", "stalled_below"), ("VerdictConfig", "rise"), ("VerdictConfig", "patience")}
    assert fields - read - told_apart_by_type - passed_whole == set()
    assert {name for _, name in passed_whole} <= set(inspect.signature(verdict.judge).parameters)


def test_the_tables_have_the_rows_that_the_config_accepts():
    assert set(get_args(config_model.InitName)) == set(INITS)
    assert set(get_args(config.OptimizerName)) == set(OPTIMIZERS)
    assert set(get_args(config.ScheduleName)) == set(SCHEDULES)


def test_every_placement_composes():
    for placement in PLACEMENTS:
        assert compose(f"model.placement={placement}").model.placement == placement


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data=text", "data.vocab=16"], r"data\.vocab: the chosen data has no such key"),
        (["data.name=foo"], r"data\.name='foo': accepted: 'text', 'markov'"),
        (["model.norm=batchnorm", "model.context=1", "data.batch_size=1"], r"model\.norm=batchnorm needs two tokens"),
        (["model.qk_norm=heads"], r"model\.qk_norm='heads': .*False, True, 'head' or 'joint'"),
        (["model.bias=foo"], r"model\.bias='foo': .*True, False, 'qkv' or 'ffn'"),
        (["model.placement=perri"], r"model\.placement='perri': .*did you mean peri"),
        (["spikes.mad.window=5"], r"a detector's window=5; accepted: 9 or more"),
        (["model.norm=none", "model.qk_norm=true"], r"model\.qk_norm=head needs a norm"),
        (["model.ffn_ratio=0.001"], r"model\.ffn_ratio=0\.001 leaves no FFN unit"),
        (["data.path="], r"data\.path='': empty"),
        (["data.glob="], r"data\.glob='': .*at least 1 character, or null"),
        (["runs_dir="], r"runs_dir='': empty"),
        (["runs_dir=/dev/null/x"], r"runs_dir='/dev/null/x': Not a directory"),
        (["data.path=/proc/self/mem"], r"data\.path='/proc/self/mem': Input/output error"),
        ([f"data.path={ROOT}", "data.glob=/tmp/*"], r"data\.glob='/tmp/\*': accepted: a pattern relative"),
        (["seed=99999999999999999999"], r"seed=99999999999999999999: "),
        (["-m", "seed=99999999999999999999,0"], r"seed=99999999999999999999: "),
        (["model=null"], r"must be a string or a list"),
        (["optim.betas=[0.9]"], r"optim\.betas"),
        (["~seed"], r"seed: missing"),
        (["-cn", "nope"], r"nope"),
    ],
)
def test_more_mistakes(overrides, told):
    with pytest.raises(ConfigError, match=told) as caught:
        cli.check(ROOT, overrides)
    assert "\n" not in str(caught.value)


def test_a_glob_over_a_group_is_a_sweep():
    cli.check(ROOT, ["-m", "optim=glob(s*)", "log=disabled"])
