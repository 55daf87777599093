"""Models as data: sizes that add up to the published parameter counts, and one clear line for a wrong file."""

from importlib.resources import files

import pytest

from simulator import published
from simulator.errors import InputError
from simulator.model_zoo import TransformerModel, load_model, model_names

MODELS = [load_model(name) for name in model_names()]
# Counted from the released weights, entered here independently of the files.
EXACT = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 336_226_108,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2.5-32b": 32_763_876_352,
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parameter_count_is_the_published_one(model):
    published_count, half_unit = model.published_parameter_count()
    # 1 %, or what the rounding of a figure such as "1.3B" leaves open.
    assert abs(model.parameter_count() - published_count) <= max(0.01 * published_count, half_unit)


@pytest.mark.parametrize("name", EXACT)
def test_parameter_count_is_exact_where_the_weights_were_counted(name):
    assert load_model(name).parameter_count() == EXACT[name]


def test_published_counts_carry_their_rounding():
    assert load_model("gpt3-1.3b").published_parameter_count() == (1.3e9, 0.05e9)
    assert load_model("gpt2-small").published_parameter_count() == (124_439_808, 0.5)


def test_files_are_named_as_their_models_and_cover_the_published_training_rows():
    assert [model.name for model in MODELS] == model_names()
    with open(published.published_directory() / "training.csv", encoding="utf-8") as file:
        trained = {line.split(",")[0] for line in file} - {"model"}
    assert trained <= set(model_names()) and len(trained) == 10
    assert {"llama-3-8b", "llama-3-70b", "qwen2.5-32b"} <= set(model_names())


def test_a_layer_by_hand():
    # Llama 3 8B: q 4096x4096, k and v 4096x1024, o 4096x4096, three matrices 4096x14336, two norms of 4096.
    model = load_model("llama-3-8b")
    by_hand = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert model.layer_parameter_count() == by_hand
    shapes = {linear.name: (linear.in_features, linear.out_features) for linear in model.layer_linears()}
    assert shapes == {
        "qkv": (4096, 6144),
        "attention_out": (4096, 4096),
        "ffn_in": (4096, 28672),
        "ffn_out": (14336, 4096),
    }
    assert model.output_linear()[1:3] == (4096, 128256)
    # GPT-2: 12 h^2 weights, and biases 3h + h + 4h + h, and two norms of 2h.
    h = 768
    assert load_model("gpt2-small").layer_parameter_count() == 12 * h * h + 9 * h + 4 * h


def test_kv_cache():
    # 32 layers, 8 KV heads of 128, K and V in two bytes: 128 KiB a token.
    model = load_model("llama-3-8b")
    assert model.kv_cache_bytes(1, 1) == 131072
    assert model.kv_cache_bytes(16, 8192, "bf16") == 16 * 8192 * 131072
    assert model.kv_cache_bytes(16, 8192, "fp8") * 2 == model.kv_cache_bytes(16, 8192, "fp16")
    # Four times the query heads per KV head, a quarter of the cache.
    assert load_model("llama-2-7b").kv_cache_bytes(1, 1) == 4 * model.kv_cache_bytes(1, 1)
    with pytest.raises(InputError, match=r"dtype: 'int4' is unknown"):
        model.kv_cache_bytes(1, 1, "int4")
    with pytest.raises(InputError, match="batch: -1 is negative"):
        model.kv_cache_bytes(-1, 1)


GOOD = {
    key: value
    for key, value in load_model("gpt2-small").model_dump().items()
    if key not in ("note", "extra_parameters", "name", "title", "source")
}
HEADER = 'name: mine\ntitle: Mine\nsource: "a test"\n'


def write(tmp_path, **changes):
    lines = [f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in GOOD.items()]
    for key, text in changes.items():
        lines = [line for line in lines if not line.startswith(f"{key}:")] if text is None else lines
        if text is not None:
            replaced = [text if line.startswith(f"{key}:") else line for line in lines]
            lines = replaced if replaced != lines else [*lines, text]
    path = tmp_path / "mine.yaml"
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_users_file_is_a_model(tmp_path):
    model = load_model(write(tmp_path))
    assert isinstance(model, TransformerModel) and model.parameter_count() == EXACT["gpt2-small"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "layers: -3"}, r"mine\.yaml:4: layers: -3 is wrong; input should be greater than 0"),
        ({"layers": "layers: twelve"}, r"mine\.yaml:4: layers: 'twelve' is wrong; input should be a valid integer"),
        ({"layers": "layers: 12.5"}, r"mine\.yaml:4: layers: 12\.5 is wrong"),
        ({"kv_heads": "kv_heads: 5"}, r"mine\.yaml:7: kv_heads: 5 does not divide heads 12; each KV head"),
        (
            {"ffn_kind": "ffn_kind: relu"},
            r"mine\.yaml:10: ffn_kind: 'relu' is wrong; input should be 'gelu' or 'swiglu'",
        ),
        ({"hiden": "hiden: 768"}, r"mine\.yaml:20: hiden: unknown key; did you mean 'hidden'\?"),
        ({"vocab": None}, r"mine\.yaml:1: vocab: missing; add a line 'vocab: \.\.\.'"),
        ({"causal": "causal: maybe"}, r"causal: 'maybe' is wrong; input should be a valid boolean"),
        (
            {"published_parameters": "published_parameters: lots"},
            r"mine\.yaml:19: published_parameters: 'lots' is no count",
        ),
        ({"heads": "heads: [1"}, r"mine\.yaml:\d+: YAML syntax: "),
        ({"extra": "layers: 12"}, r"mine\.yaml:20: layers: given twice \(first on line 4\); keep one"),
        ({"extra": "3: 4"}, r"mine\.yaml:20: 3: unknown key; known: name"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        load_model(write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_unknown_names_and_files(tmp_path):
    with pytest.raises(InputError, match=r"unknown model 'gpt2-smal'; did you mean 'gpt2-small'\?"):
        load_model("gpt2-smal")
    with pytest.raises(InputError, match=r"nothere\.yaml: cannot be read \(No such file or directory\)"):
        load_model(tmp_path / "nothere.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"list\.yaml:1: not a model"):
        load_model(path)


def test_sizes_that_count_to_other_parameters_than_published_are_doubted():
    """A mistyped size shows there; shipped models and rounded counts do not."""
    model = load_model("llama-3.2-1b")
    assert all(load_model(name).doubt() is None for name in model_names())
    wrong = model.model_copy(update={"ffn_size": model.ffn_size * 2})
    assert f"{wrong.parameter_count():,}" in (wrong.doubt() or "")
    assert model.model_copy(update={"published_parameters": "1.2B"}).doubt() is None


def test_a_mistyped_key_is_named_rather_than_the_one_that_is_then_missing(tmp_path):
    shipped = (files("simulator") / "models" / "gpt2-small.yaml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(shipped.replace("layers:", "layerz:"), encoding="utf-8")
    with pytest.raises(InputError, match=r"mine.yaml:4: layerz: unknown key; did you mean.*layers"):
        load_model(path)
