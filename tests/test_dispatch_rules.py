"""Rule files are data: conditions, versions, inheritance, mistakes with file and line, and frameworks of one's own."""

import pytest

from simulator import AttentionProblem, load_profile
from simulator.dispatch.conditions import OPERATORS, Comparison, FactName, Group
from simulator.dispatch.decide import decide, failed_rules
from simulator.dispatch.facts import FACTS, facts_of, parse_facts, with_settings
from simulator.dispatch.rule_files import find_rules, read_rules, rule_bases
from simulator.errors import InputError

OWN = """
framework: mine
version: "1.0"
title: my kernels
source: me
settings:
  fancy: {kind: flag, default: no, about: "a switch"}
orders:
  - when: [fancy, is, yes]
    backends: [slow, quick]
    why: "fancy is {fancy}"
    source: me
  - backends: [quick, slow]
    why: the usual order
    source: me
fallback: silent
silence: nothing is said
how_to_see: look
how_to_force: ask
none_left: it raises
backends:
  quick:
    title: the quick one
    rules:
      - id: narrow
        requires: [head_dim, <=, 128]
        message: "head dim {head_dim} is above 128"
        source: me
    models:
      - as: itself
        algorithm: fa2
  slow:
    title: the slow one
    rules: []
    models:
      - as: not_modelled
        note: no model of it
"""


def test_a_framework_is_added_by_a_file_alone(tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN)
    base, about = find_rules("mine", None, tmp_path)
    assert (base.name, about) == ("mine 1.0", "")
    profile = load_profile("a100_sxm4_80gb")
    narrow, wide = (facts_of(AttentionProblem(head_dim=d), profile) for d in (128, 192))
    assert decide(base, with_settings(base, narrow, {})).chosen.name == "quick"
    decision = decide(base, with_settings(base, wide, {}))
    assert decision.chosen.name == "slow" and decision.rejected == ("quick",)
    assert decision.why_not("quick") == "head dim 192 is above 128"
    assert decision.model()[0].kind == "not_modelled"
    fancy = decide(base, with_settings(base, narrow, parse_facts(base, ("fancy=yes",))))
    assert fancy.chosen.name == "slow" and fancy.why_order == "fancy is yes" and fancy.untried == ("quick",)
    # the shipped ones are still there
    assert find_rules("torch", None, tmp_path)[0].version == "2.11"


def test_a_file_changes_another_by_naming_it(tmp_path):
    text = """
framework: torch
version: "9.9"
base: torch_2_11
backends:
  flash:
    without: [mask]
    rules:
      - {id: head_dim, requires: [head_dim, <=, 512], message: "{head_dim} is too wide", source: a dream}
"""
    (tmp_path / "torch_9_9.yaml").write_text(text)
    base, _ = find_rules("torch", "9.9", tmp_path)
    old, _ = find_rules("torch", "2.11", tmp_path)
    rules = {rule.id: rule for rule in base.backends["flash"].rules}
    assert "mask" not in rules and rules["head_dim"].source == "a dream"
    assert len(rules) == len(old.backends["flash"].rules) - 1
    assert base.backends["cudnn"] == old.backends["cudnn"] and base.orders == old.orders


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[head_dim, <=, 128]", "[head_dime, <=, 128]", "did you mean 'head_dim'?"),
        ("[head_dim, <=, 128]", "[head_dim, =<, 128]", "'=<' is unknown; did you mean '<'?"),
        ("[head_dim, <=, 128]", "[head_dim, <=, wide]", "'wide' is no value of it"),
        ("[head_dim, <=, 128]", "[dtype, is, bf61]", "did you mean 'bf16'?"),
        ("[head_dim, <=, 128]", "[causal, <, 1]", "'<' does not fit a flag"),
        ("[head_dim, <=, 128]", "[head_dim, in, 128]", "write [a, b]"),
        ("[head_dim, <=, 128]", "{al: [[head_dim, <=, 128]]}", "did you mean 'all'?"),
        ("[head_dim, <=, 128]", "__import__('os').getcwd()", "not a list"),
        ("{head_dim} is", "{heddim} is", "'heddim' is unknown"),
        ("{head_dim} is", "{head_dim.__class__} is", "is unknown"),
        ("algorithm: fa2", "algorithm: fa9", "'fa9' is unknown"),
        ("as: itself", "as: likely", "'likely' is unknown"),
        ("fallback: silent", "fallback: loud", "'loud' is unknown"),
        ("backends: [quick, slow]", "backends: [quack, slow]", "did you mean 'quick'?"),
        ('version: "1.0"', "version: one", "'one' is no version"),
        ("title: my kernels", "tittle: my kernels", "did you mean 'title'?"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path, old, new, said):
    path = tmp_path / "mine.yaml"
    line = OWN[: OWN.index(old)].count("\n") + 1
    path.write_text(OWN.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        read_rules(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and said in message and "\n" not in message


def test_two_files_of_one_name_and_a_missing_base(tmp_path):
    (tmp_path / "a.yaml").write_text(OWN)
    (tmp_path / "b.yaml").write_text(OWN)
    with pytest.raises(InputError, match=r"mine 1\.0 is also in"):
        find_rules("mine", None, tmp_path)
    (tmp_path / "b.yaml").write_text('framework: mine\nversion: "2"\nbase: torch_2_12\n')
    with pytest.raises(InputError, match=r"b\.yaml:3: base: no rule file torch_2_12.*did you mean 'torch_2_1"):
        find_rules("mine", None, tmp_path)


def test_versions_take_the_newest_that_is_not_newer():
    asked = {"2.5.1": "2.5", "2.9": "2.5", "2.10.0+cu128": "2.10", "2.11": "2.11", "2.13": "2.11", "3.0": "2.14"}
    for version, used in asked.items():
        base, about = find_rules("torch", version)
        assert base.version == used
        assert bool(about) == (not version.startswith(used)), version
    assert find_rules("torch")[0].version == "2.11"
    for version, said in (("1.0", "there are rules for 2.5, 2.10"), ("new", "is no version")):
        with pytest.raises(InputError, match=said):
            find_rules("torch", version)
    with pytest.raises(InputError, match="did you mean 'vllm'"):
        find_rules("vlllm")


def test_every_shipped_rule_has_a_source_and_can_fail():
    """No rule is true of everything: each refuses some call of a varied set, or speaks of a value outside it."""
    profiles = [load_profile(name) for name in ("a100_sxm4_80gb", "h200_sxm", "b200")]
    for base in rule_bases():
        assert base.source and base.how_to_see and base.how_to_force
        for backend in base.backends.values():
            for rule in backend.rules:
                assert len(rule.source) > 5, (base.name, rule.id)
                names = set(rule.requires.names())
                assert names, rule.id
        # a plain call runs somewhere
        plain = facts_of(AttentionProblem(heads=8, kv_heads=2), profiles[1])
        if base.name != "flash-attn 1.0":
            assert decide(base, with_settings(base, plain, {})).chosen is not None


def test_operators():
    facts = {"a": 8, "b": 0.1875, "c": True, "d": frozenset({"wgmma"}), "e": "bf16", "f": 8}
    true = [("a", "multiple of", 8), ("b", "multiple of", 0.0625), ("c", "is", True), ("d", "has", "wgmma"),
            ("e", "in", ("fp16", "bf16")), ("a", "is", FactName("f")), ("a", ">", 7.5), ("a", "<=", 8)]  # fmt: skip
    false = [("b", "multiple of", 0.1), ("d", "lacks", "wgmma"), ("e", "not in", ("bf16",)), ("a", "<", FactName("f"))]
    assert all(Comparison(*one).holds(facts) for one in true)
    assert not any(Comparison(*one).holds(facts) for one in false)
    both = Group("all", (Comparison(*true[0]), Comparison(*false[0])))
    assert not both.holds(facts) and Group("any", both.parts).holds(facts) and Group("not", (both,)).holds(facts)
    assert set(both.names()) == {"a", "b"}
    assert not Comparison("a", "multiple of", 0).holds(facts)
    used = {one[1] for one in true + false}
    assert used | {"is not", ">="} == set(OPERATORS)


def test_facts_are_those_of_the_call():
    problem = AttentionProblem(2, 16, 4, 1, 4096, 96, 64, "fp16", causal=True, pass_="bwd", dropout=0.1, page_size=64)
    facts = facts_of(problem, load_profile("h100_sxm"))
    assert set(facts) == set(FACTS)
    assert (facts["group"], facts["queries_in_group"], facts["gqa"], facts["training"]) == (4, 4, True, True)
    assert facts["score_bytes_fp32"] == 2 * 16 * 4096 * 4
    assert facts["input_bytes"] == 2 * 2 * (16 * 96 + 4 * 4096 * (96 + 64))
    assert facts["compute_capability"] == 9.0 and "wgmma" in facts["capabilities"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank", "write NAME=VALUE"),
        ("ranc=3", "did you mean 'rank'?"),
        ("rank=three", "not a number"),
        ("causal=perhaps", "not a yes or no"),
        ("dtype=bf61", "did you mean 'bf16'?"),
        ("capabilities=wgmma+tmma", "did you mean 'tma'?"),
    ],
)
def test_a_fact_that_cannot_be_read(text, said):
    with pytest.raises(InputError) as caught:
        parse_facts(find_rules("torch")[0], (text,))
    assert said in str(caught.value)


def test_a_settings_words_are_checked():
    with pytest.raises(InputError, match="did you mean 'fp8'"):
        parse_facts(find_rules("vllm")[0], ("kv_cache_dtype=fp9",))


def test_mla_in_vllm():
    """Head dims 576/512 have an order of their own; Hopper's first is FA3's kernel, Ampere has Triton's only."""
    base, _ = find_rules("vllm")
    problem = AttentionProblem(8, 16, 1, 1, 4096, 576, 512)
    expected = {"h200_sxm": "flash_attn_mla", "b200": "flashinfer_mla", "a100_sxm4_80gb": "triton_mla"}
    for gpu, backend in expected.items():
        facts = with_settings(base, facts_of(problem, load_profile(gpu)), {})
        assert decide(base, facts).chosen.name == backend
    fp8 = with_settings(base, facts_of(problem, load_profile("h200_sxm")), {"kv_cache_dtype": "fp8"})
    decision = decide(base, fp8)
    assert decision.chosen.name == "flashmla" and decision.model()[0].kind == "stand_in"


def test_a_given_fact_replaces_the_gpus():
    base, _ = find_rules("torch")
    facts = facts_of(AttentionProblem(head_dim=256, pass_="bwd", dropout=0.1), load_profile("a100_sxm4_80gb"))
    given = parse_facts(base, ("compute_capability=8.9",))
    failed = failed_rules(base, base.backends["flash"], with_settings(base, facts, given))
    assert [one.rule for one in failed] == ["training_head_dim"]
    assert not failed_rules(base, base.backends["flash"], with_settings(base, facts, {}))
