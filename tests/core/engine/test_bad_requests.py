"""A bad request is refused at once, says what would be right, and hurts nobody: a good one after it gets its ids."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import Engine, InvalidRequest, Part, QueueFull, Request, SamplingParams, hookimpl
from pegboard.streams import Handle
from pegboard.testing.tiny import tiny_model
from pegboard_cache.options import PagedOptions
from pegboard_cache.paged import PagedCache

LIMIT = 64
PROMPT = [1, 17, 42, 200, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
#: A page of the tiny model in float32: 16 entries, K and V, 2 heads of 16, 3 layers.
PAGE = 16 * 2 * 2 * 16 * 4 * 3


@pytest.fixture(scope="module")
def oracle(tiny_path: Path) -> Callable[[Sequence[int], int], tuple[int, ...]]:
    """(prompt, new) -> greedy ids, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()

    def greedy(prompt: Sequence[int], new: int) -> tuple[int, ...]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(new):
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > 1e-3, f"{prompt} is a close call: rounding might decide"
                ids.append(int(best.indices[0]))
        return tuple(ids[len(prompt) :])

    return greedy


@pytest.fixture(scope="module")
def good(oracle: Callable[..., tuple[int, ...]]) -> tuple[int, ...]:
    return oracle(PROMPT, 8)


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> Iterator[Engine]:
    with Engine(tiny_path, device="cpu", max_rows=4, max_queue=8, max_length=LIMIT) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine, good: tuple[int, ...]) -> Iterator[Engine]:
    """The same engine for every bad request of this file; after each a good one must still be served."""
    yield shared
    assert shared.submit(PROMPT, GREEDY).result(timeout=30).raise_for_error().token_ids == good
    assert settles(shared)


def settles(engine: Engine) -> bool:
    """Whether nothing is left in the engine, at the latest after 10 s."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        stats = engine.stats()
        if (stats.waiting, stats.running, stats.preempted, stats.paused) == (0, 0, 0, 0):
            return True
        time.sleep(0.005)
    return False


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; fails when it hangs."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"still waiting after {seconds} s"
    value, error = found[0]
    if error is not None:
        raise error
    return value


def _type_name(value: object) -> str:
    return type(value).__name__


# -- prompts


@pytest.mark.parametrize("prompt", [[], (), range(0)], ids=str)
def test_empty_prompt(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"empty.*at least one token"):
        engine.submit(prompt, GREEDY)


@pytest.mark.parametrize(
    "prompt", [[1, 211], [1, -1], [2**70], [1.0, 2.0], [1, True], ["1"], [None], [[1]], [math.nan], [1, b"x"]], ids=str
)
def test_ids_that_are_none(engine: Engine, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="token ids from 0 to 210"):
        engine.submit(prompt, GREEDY)


@pytest.mark.parametrize(
    "prompt", [None, 5, 1.5, {}, {1: 2}, {1, 2}, b"ab", bytearray(b"ab"), object()], ids=_type_name
)
def test_prompts_of_a_wrong_type(engine: Engine, prompt: Any) -> None:
    """Bytes are a sequence of numbers, but nobody who passes them means token ids."""
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.submit(prompt, GREEDY)


def test_numpy_ids_are_ids(engine: Engine, good: tuple[int, ...]) -> None:
    import numpy as np

    assert engine.submit(list(np.array(PROMPT)), GREEDY).result(timeout=30).token_ids == good


def test_text_for_a_model_without_tokenizer(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer.*token ids"):
        engine.generate("hello", GREEDY)


def test_chat_for_a_model_without_tokenizer(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*prompt of your own"):
        engine.chat([{"role": "user", "content": "hello"}], GREEDY)


def test_a_list_of_numbers_is_one_prompt(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="put it into a list"):
        engine.generate(PROMPT, GREEDY)  # type: ignore[arg-type]


# -- limits


def test_one_token_over_the_limit(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=rf"{LIMIT} tokens.*holds {LIMIT}.*shorten"):
        engine.submit([5] * LIMIT, SamplingParams(temperature=0.0))
    with pytest.raises(InvalidRequest, match=rf"{LIMIT + 1} tokens"):
        engine.submit([5] * (LIMIT + 1), SamplingParams(temperature=0.0, max_tokens=1))


def test_prompt_and_new_tokens_one_over(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=LIMIT - len(PROMPT) + 1)
    with pytest.raises(InvalidRequest, match=rf"max_tokens {LIMIT - 4} makes {LIMIT + 1}.*holds {LIMIT}"):
        engine.submit(PROMPT, sampling)


@pytest.mark.parametrize("length", [1, 5, 16, 17, LIMIT - 1])
def test_exactly_at_the_limit(engine: Engine, oracle: Any, length: int) -> None:
    prompt = [1 + (7 * i) % 200 for i in range(length)]
    new = LIMIT - length
    for sampling in (
        SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True),
        SamplingParams(temperature=0.0, ignore_eos=True),  # as many as there is room for
    ):
        output = engine.submit(prompt, sampling).result(timeout=30).raise_for_error()
        assert output.token_ids == oracle(prompt, new)
        assert output.finish_reason == "length"


class RoomyCache(PagedCache):
    """Serves sequences up to the whole pool, though `max_length` is more: the contract lets a manager do that."""

    @classmethod
    def refusals(cls, need: Any, options: Any) -> Sequence[str]:
        return []


class Roomy:
    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [
            Part(role="cache", name="roomy", factory=RoomyCache, options=PagedOptions, summary="no longest request")
        ]


def test_more_than_the_whole_cache(
    tiny_path: Path, make_engine: Callable[..., Engine], good: tuple[int, ...], oracle: Any
) -> None:
    """Two pages of 16 beside the null page, in an engine for 64 tokens."""
    engine = make_engine(
        tiny_path, device="cpu", max_length=LIMIT, max_rows=2, kv_memory=3 * PAGE, plugins=[Roomy()], cache="roomy"
    )
    with pytest.raises(InvalidRequest, match="whole KV cache holds 32"):
        engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=28))
    with pytest.raises(InvalidRequest, match="whole KV cache holds 32"):
        engine.submit([5] * 32, SamplingParams(temperature=0.0))
    full = engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=27, ignore_eos=True))
    assert full.result(timeout=30).raise_for_error().token_ids == oracle(PROMPT, 27)
    open_end = engine.submit(PROMPT, SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(open_end.result(timeout=30).raise_for_error().token_ids) == 27
    assert engine.submit(PROMPT, GREEDY).result(timeout=30).token_ids == good


# -- sampling parameters

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NO_NUMBER = (math.nan, math.inf, -math.inf, "0.5", None, True, [0.5], 1j)
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs")
_NO_INTEGER = (1.5, math.nan, "4", True, [4], 2**70, -(2**70))
_RANGES: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.001, -1, 1e300),
    "top_p": (-0.001, 1.001, 2),
    "min_p": (-0.001, 1.001, 50),
    "repetition_penalty": (0, 0.0, -1.5),
    "presence_penalty": (1e300, -1e300),
    "frequency_penalty": (1e300, -1e300),
    "max_tokens": (0, -1),
    "min_tokens": (-1, None),
    "top_k": (-1, None),
    "seed": (2**64, -(2**63) - 1),
    "n": (0, -1, None, 100_000),
    "logprobs": (-1, 212),
    "prompt_logprobs": (-1, 212),
    "stop": ("", "abc", [""], ["a", ""], [5], [None], None, 5, b"ab", [b"a"]),
    "stop_token_ids": (5, None, "5", [211], [-1], [1.5], [True], ["5"], {5: 5}),
    "logit_bias": (
        {211: 1.0},
        {-1: 1.0},
        {"5": 1.0},
        {1.5: 1.0},
        {None: 1.0},
        {5: math.nan},
        {5: math.inf},
        {5: "x"},
        {5: None},
        {5: True},
        [(5, 1.0)],
        None,
    ),
    "include_stop": ("no", None, 2, []),
    "ignore_eos": ("no", None, 2, []),
    "logprobs_mode": ("RAW", "", None, 5, ["raw"]),
}
_CASES = [
    *((name, value) for name in _FLOATS for value in _NO_NUMBER),
    *((name, value) for name in _INTEGERS for value in _NO_INTEGER),
    *((name, value) for name, values in _RANGES.items() for value in values),
]


@pytest.mark.parametrize(("name", "value"), _CASES, ids=[f"{name}={value!r}" for name, value in _CASES])
def test_sampling_parameter(shared: Engine, name: str, value: Any) -> None:
    """The message names the field and shows the value. (A good request follows below: one for all of these.)"""
    with pytest.raises(InvalidRequest) as caught:
        shared.submit(PROMPT, SamplingParams(**{name: value}))
    message = str(caught.value)
    assert name in message
    assert "must" in message or "holds" in message


def test_a_good_request_after_all_of_these(engine: Engine, good: tuple[int, ...]) -> None:
    assert engine.submit(PROMPT, GREEDY).result(timeout=30).raise_for_error().token_ids == good


def test_every_wrong_field_is_named_at_once(engine: Engine) -> None:
    sampling = SamplingParams(temperature=-1, top_p=2, max_tokens=0, stop=("",), logit_bias={999: 1.0})
    with pytest.raises(InvalidRequest, match=r"max_tokens.*temperature.*top_p.*stop.*logit_bias"):
        engine.submit(PROMPT, sampling)


def test_min_tokens_above_max_tokens(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 9, must not exceed max_tokens, 8"):
        engine.submit(PROMPT, SamplingParams(min_tokens=9, max_tokens=8))


def test_more_samples_than_the_queue_holds(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"n is 9.*queue holds 8"):
        engine.submit(PROMPT, SamplingParams(n=9, max_tokens=1))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, 5, "greedy"], ids=repr)
def test_sampling_of_a_wrong_type(engine: Engine, sampling: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling"):
        engine.submit(PROMPT, sampling)
    with pytest.raises(InvalidRequest, match="sampling"):
        engine.submit(Request(prompt=PROMPT, sampling=sampling))


def test_nothing_left_to_choose_fails_that_request_only(engine: Engine, good: tuple[int, ...]) -> None:
    """Legal values that forbid every token: it can't be known at submission for any model, so it ends with an error."""
    bias = dict.fromkeys(range(211), -math.inf)
    other = engine.submit(PROMPT, GREEDY)
    output = engine.submit(PROMPT, SamplingParams(max_tokens=4, logit_bias=bias)).result(timeout=30)
    assert output.finish_reason == "error"
    assert "no token was left" in str(output.error)
    assert other.result(timeout=30).token_ids == good


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e4])
def test_extreme_temperatures_are_served(engine: Engine, good: tuple[int, ...], temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True)
    output = engine.submit(PROMPT, sampling).result(timeout=30).raise_for_error()
    assert len(output.token_ids) == 8
    if temperature < 1:
        assert output.token_ids == good


# -- the request's own fields


@pytest.mark.parametrize("timeout", [0, 0.0, -1, -0.5, math.nan, -math.inf, "1", "soon", [1], True], ids=repr)
def test_timeout(engine: Engine, timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout is"):
        engine.submit(PROMPT, GREEDY, timeout=timeout)


def test_a_timeout_that_never_comes(engine: Engine, good: tuple[int, ...]) -> None:
    assert engine.submit(PROMPT, GREEDY, timeout=math.inf).result(timeout=30).token_ids == good


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", None),
        ("priority", math.nan),
        ("priority", [1]),
        ("salt", None),
        ("salt", 5),
        ("salt", ["a"]),
        ("special", "no"),
        ("special", None),
    ],
    ids=repr,
)
def test_fields_of_a_wrong_type(
    tiny_path: Path, make_engine: Callable[..., Engine], good: tuple[int, ...], name: str, value: Any
) -> None:
    """An engine of its own each: what gets past admission fails in a step, beside others."""
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_length=LIMIT)
    beside = engine.submit(PROMPT, GREEDY)
    with pytest.raises(InvalidRequest, match=name):
        engine.submit(PROMPT, GREEDY, **{name: value})
    assert beside.result(timeout=30).raise_for_error().token_ids == good
    assert engine.submit(PROMPT, GREEDY).result(timeout=30).raise_for_error().token_ids == good


@pytest.mark.parametrize("id", [5, b"x", ["a"], ("a", 1)], ids=repr)
def test_ids_of_a_wrong_type(engine: Engine, id: Any) -> None:
    with pytest.raises(InvalidRequest, match="id"):
        engine.submit(PROMPT, GREEDY, id=id)


def test_unknown_options_are_not_swallowed(engine: Engine) -> None:
    """As for any Python call; a list must not turn the caller's own mistake into outputs."""
    for call in (
        lambda: engine.submit(PROMPT, GREEDY, temperature=0.0),
        lambda: engine.generate([PROMPT], GREEDY, temperature=0.0),
        lambda: engine.stream(PROMPT, GREEDY, temperature=0.0),
        lambda: engine.submit(Request(prompt=PROMPT), GREEDY, temperature=0.0),
    ):
        with pytest.raises((TypeError, InvalidRequest), match="temperature"):
            call()


_SALTS: tuple[dict[str, Any], ...] = ({}, {}, {"salt": "b"}, {"salt": "a"})


def test_options_beside_a_request_are_not_ignored(engine: Engine) -> None:
    request = Request(prompt=[9] * 40, sampling=GREEDY, salt="a")
    assert engine.submit(request, timeout=1e-9).result(timeout=30).finish_reason == "deadline"
    cached = [
        engine.submit(request, **options).result(timeout=30).raise_for_error().metrics.cached_tokens
        for options in _SALTS
    ]
    assert cached == [0, 32, 0, 32]


# -- ids that are live


def test_an_id_that_is_live(engine: Engine, oracle: Any, good: tuple[int, ...]) -> None:
    first = engine.submit(PROMPT, LONG, id="mine")
    with pytest.raises(InvalidRequest, match="'mine' is live"):
        engine.submit(PROMPT, GREEDY, id="mine")
    assert first.result(timeout=30).raise_for_error().token_ids == oracle(PROMPT, 50)
    assert engine.submit(PROMPT, GREEDY, id="mine").result(timeout=30).token_ids == good


def test_an_id_like_another_requests_continuation(engine: Engine, good: tuple[int, ...]) -> None:
    """How continuations are named inside is nobody's business: both are served, or the second is refused."""
    many = engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, n=2), id="twin")
    try:
        output = engine.submit(PROMPT, GREEDY, id="twin/0").result(timeout=30)
    except InvalidRequest:
        pass
    else:
        assert output.raise_for_error().token_ids == good
    completions = many.result(timeout=30).raise_for_error().completions
    assert [c.token_ids[:8] for c in completions] == [good, good]


def test_an_id_that_the_engine_would_give_next(engine: Engine, good: tuple[int, ...]) -> None:
    """Who gives no id must not be told to give another."""
    last = engine.submit(PROMPT, GREEDY)
    last.result(timeout=30)
    stem, _, number = last.id.rpartition("-")
    taken = engine.submit(PROMPT, LONG, id=f"{stem}-{int(number) + 1}")
    outputs = [engine.submit(PROMPT, GREEDY) for _ in range(3)]
    assert [handle.result(timeout=30).token_ids for handle in outputs] == [good] * 3
    taken.result(timeout=30).raise_for_error()


# -- the bounded queue


def test_full_queue(tiny_path: Path, make_engine: Callable[..., Engine], good: tuple[int, ...], oracle: Any) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_queue=3, max_length=LIMIT)
    admitted = []

    def fill() -> None:
        for _ in range(10):
            admitted.append(engine.submit(PROMPT, LONG))

    with pytest.raises(QueueFull, match="3"):
        fill()
    assert len(admitted) >= 3
    expected = oracle(PROMPT, 50)
    assert all(handle.result(timeout=60).raise_for_error().token_ids == expected for handle in admitted)
    assert engine.submit(PROMPT, GREEDY).result(timeout=30).token_ids == good


def test_all_samples_of_a_request_find_room_or_none(tiny_path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_queue=3, max_length=LIMIT)
    admitted = [engine.submit(PROMPT, LONG) for _ in range(3)]
    before = engine.stats()
    with pytest.raises(QueueFull):
        engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, n=3), id="three")
    after = engine.stats()
    assert after.waiting + after.running <= before.waiting + before.running
    assert not engine.abort("three")
    assert all(handle.result(timeout=60).error is None for handle in admitted)


def test_many_more_prompts_than_the_queue_holds(
    tiny_path: Path, make_engine: Callable[..., Engine], oracle: Any
) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=2, max_queue=3, max_length=LIMIT)
    prompts = [[1 + i, 200 - i, 3 * i] for i in range(40)]
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = within(60, lambda: engine.generate(prompts, sampling))
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [output.raise_for_error().token_ids for output in outputs] == [oracle(p, 2) for p in prompts]


def test_many_prompts_beside_others_who_fill_the_queue(
    tiny_path: Path, make_engine: Callable[..., Engine], oracle: Any
) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_queue=2, max_length=LIMIT)
    for _ in range(2):
        engine.submit(PROMPT, LONG)
    prompts = [[1 + i, 7, 9] for i in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = within(60, lambda: engine.generate(prompts, sampling))
    assert [output.raise_for_error().token_ids for output in outputs] == [oracle(p, 2) for p in prompts]


def test_no_prompts_no_outputs(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []


# -- one bad prompt among good ones


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "empty"),
        ([999], "0 to 210"),
        ([5] * 100, "shorten"),
        ("text", "no tokenizer"),
        (Request(prompt=PROMPT, timeout=-1), "timeout"),
        (None, "prompt"),
        (7, "prompt"),
        (b"ab", "prompt"),
    ],
    ids=["empty", "out of range", "too long", "text", "timeout", "None", "a number", "bytes"],
)
def test_one_bad_prompt_in_a_list(engine: Engine, good: tuple[int, ...], bad: Any, message: str) -> None:
    outputs = within(30, lambda: engine.generate([PROMPT, bad, PROMPT], GREEDY))
    assert [output.token_ids for output in outputs] == [good, (), good]
    assert [output.error is None for output in outputs] == [True, False, True]
    assert message in str(outputs[1].error)
    assert outputs[1].finish_reason == "error"


def test_a_single_bad_prompt_raises(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        engine.generate("text", GREEDY)


# -- abort


def test_abort_of_what_is_unknown(engine: Engine) -> None:
    assert engine.abort("nobody") is False


def test_abort_of_what_runs(engine: Engine, oracle: Any) -> None:
    handle = engine.submit(PROMPT, LONG)
    taken = handle.take(timeout=30)
    assert taken is not None
    assert engine.abort(handle.id) is True
    deltas = [taken, *handle]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["abort"]
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    assert 0 < len(ids) < 50
    assert ids == oracle(PROMPT, len(ids))
    assert engine.abort(handle.id) is False


def test_abort_of_what_waits(
    tiny_path: Path, make_engine: Callable[..., Engine], good: tuple[int, ...], oracle: Any
) -> None:
    engine = make_engine(tiny_path, device="cpu", max_rows=1, max_length=LIMIT)
    running = engine.submit(PROMPT, LONG)
    waiting, behind = engine.submit(PROMPT, LONG), engine.submit(PROMPT, GREEDY)
    assert engine.abort(waiting.id) is True
    output = waiting.result(timeout=30)
    assert (output.finish_reason, output.token_ids, output.error) == ("abort", (), None)
    assert running.result(timeout=30).token_ids == oracle(PROMPT, 50)
    assert behind.result(timeout=30).token_ids == good


def test_abort_of_what_has_ended(engine: Engine, good: tuple[int, ...]) -> None:
    handle = engine.submit(PROMPT, GREEDY)
    output = handle.result(timeout=30)
    assert engine.abort(handle.id) is False
    handle.abort()
    assert (output.finish_reason, output.token_ids) == ("length", good)
    assert handle.result(timeout=30) == output


def test_abort_ends_every_sample(engine: Engine) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True, n=3))
    handle.take(timeout=30)
    assert engine.abort(handle.id) is True
    output = handle.result(timeout=30)
    assert [(c.index, c.finish_reason) for c in output.completions] == [(0, "abort"), (1, "abort"), (2, "abort")]


def test_an_id_is_free_again_after_an_abort(engine: Engine, good: tuple[int, ...]) -> None:
    for _ in range(5):
        engine.submit(PROMPT, LONG, id="again").abort()
        for _ in range(1000):  # its end comes with the next step
            try:
                handle = engine.submit(PROMPT, GREEDY, id="again")
                break
            except InvalidRequest:
                time.sleep(0.001)
        assert handle.result(timeout=30).raise_for_error().token_ids == good


# -- text


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model with a byte-level tokenizer without merges, and no chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    path = tiny_model(tmp_path_factory.mktemp("text") / "m", vocab_size=256, tokenizer=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    with Engine(path, device="cpu", max_rows=2, max_length=LIMIT) as engine:
        yield engine


@pytest.fixture
def text_engine(with_text: Engine) -> Iterator[Engine]:
    yield with_text
    output = with_text.submit("good", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)).result(timeout=30)
    assert output.raise_for_error().prompt_token_ids == tuple(with_text.submit("good").prompt_token_ids)
    assert len(output.token_ids) == 4


def test_empty_text(text_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        text_engine.generate("", GREEDY)


def test_text_that_is_no_unicode(text_engine: Engine) -> None:
    """A lone surrogate, as `errors="surrogateescape"` leaves behind."""
    with pytest.raises(InvalidRequest, match="prompt"):
        text_engine.generate("caf\udce9", GREEDY)


def test_too_long_a_text(text_engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="100 tokens"):
        text_engine.generate("x" * 100, GREEDY)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "hi"}], []], ids=repr)
def test_chat_without_a_template(text_engine: Engine, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        text_engine.chat(messages, GREEDY)
    with pytest.raises(InvalidRequest, match="no chat template"):
        text_engine.stream_chat(messages, GREEDY)


def test_stop_texts_without_a_tokenizer(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"stop looks for texts.*use stop_token_ids"):
        engine.generate([PROMPT], SamplingParams(stop=["a"]))


@pytest.mark.parametrize("options", [{"timeout": -1}, {"salt": 3}, {"special": "yes"}, {"priority": "high"}])
def test_options_of_all_prompts_are_the_callers_mistake(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        engine.generate([PROMPT, PROMPT], GREEDY, **options)


def test_who_stops_waiting_for_many_leaves_nothing_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the first of them is waited for."""

    def interrupted(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Handle, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT] * 3, LONG)
    deadline = time.monotonic() + 10
    while engine.stats().running + engine.stats().waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


@pytest.mark.parametrize("many", [["a", "b"], [Request(prompt="a")], [Request(prompt=PROMPT)] * 2])
def test_many_where_one_is_expected(engine: Engine, many: Any) -> None:
    with pytest.raises(InvalidRequest, match="one prompt is expected here"):
        engine.submit(many)
