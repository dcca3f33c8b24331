"""Text as it arrives: whole characters, and stop strings."""

from __future__ import annotations

import random
from functools import partial

import pytest

from specattn.cli.loading import decode
from specattn.engine.detokenizer import TextStream
from tests.cli.command import tokenizer


def text_of(ids: list[int]) -> str:
    return decode(tokenizer(), ids)


@pytest.mark.parametrize("sizes", [[1], [2, 1], [5], [100]])
def test_text_arrives_in_whole_characters(sizes):
    text = "naïve 💥 日本語 x\u0301 " + "\N{FAMILY}" * 3 + " end"
    prompt = tokenizer()("# prompt: é").input_ids
    ids = tokenizer()(text).input_ids
    assert len(ids) > len(text)  # some characters take several tokens
    stream, pieces, at = TextStream(text_of, prompt), [], 0
    while at < len(ids):
        for size in sizes:
            pieces.append(stream.feed(ids[at : at + size]))
            at += size
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("size", [1, 3])
def test_a_long_text_keeps_its_spaces_and_is_made_about_once(size):
    """Some tokenizers drop the space that a text begins with: pieces begin nowhere but there."""
    made: list[list[int]] = []

    def detokenize(ids: list[int]) -> str:
        made.append(list(ids))
        return "".join(f" {token}" for token in ids).removeprefix(" ")

    ids = [7 * at % 101 for at in range(300)]
    stream = TextStream(detokenize, [1, 2, 3])
    feeds = range(0, len(ids), size)
    pieces = [stream.feed(ids[at : at + size]) for at in feeds]
    assert "".join(pieces) + stream.finish() == " " + " ".join(map(str, ids))
    assert len(made) < 1.2 * len(feeds)
    assert max(map(len, made)) < 50


def test_text_that_ends_inside_a_character():
    ids = tokenizer()("ok 💥").input_ids
    stream = TextStream(text_of, [])
    shown = "".join(stream.feed([token]) for token in ids[:-1])
    assert shown == "ok "
    assert stream.finish() == text_of(ids[:-1])[3:]
    assert stream.text == text_of(ids[:-1])


def test_what_may_begin_a_stop_string_is_held_back():
    ids = tokenizer()("one two three four").input_ids
    stream = TextStream(text_of, [], ["two thirds", "four!", "three"])
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(pieces) == stream.text == "one two "
    assert stream.stopped
    assert stream.finish() == ""
    ended = TextStream(text_of, [], ["four!"])
    shown = "".join(ended.feed([token]) for token in ids)
    assert shown == "one two three "
    assert ended.finish() == "four"
    assert ended.text == "one two three four"


def test_text_ends_before_the_stop_string_that_comes_first_in_it():
    """Not before that which is listed first; a piece may hold several."""
    ids = tokenizer()("one two three four").input_ids
    for stops in (["four", "two"], ["two", "four"]):
        stream = TextStream(text_of, [], stops)
        assert stream.feed(ids) == stream.text == "one "
        assert stream.stopped


def brute(pieces: list[str], stops: list[str], least: int) -> str:
    """What is before the stop string that is complete first, looked for character by character."""
    text, free = "".join(pieces), len("".join(pieces[:least]))
    for end in range(free, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[free:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


def test_the_runs_that_tokens_come_in_do_not_matter():
    """Where stop strings overlap, one by one gave another text than all at once."""
    rng = random.Random(0)
    words = ["a", "b", "\n", "ab", "\n\n", "b\n", ""]
    for case in range(400):
        pieces = [rng.choice(words) for _ in range(rng.randint(1, 9))]
        stops = [
            "".join(rng.choices("ab\n", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))
        ]
        least = rng.choice([0, 0, 1, 3])
        if not case:
            pieces, stops, least = ["a", "b", "\n", "\n"], ["b\n\n", "\n"], 0
        want = brute(pieces, stops, least)
        for most in (1, 2, len(pieces)):
            text = partial(map, pieces.__getitem__)
            stream = TextStream(lambda ids, text=text: "".join(text(ids)), [], stops, least)
            shown, at = "", 0
            while at < len(pieces) and not stream.stopped:
                size = rng.randint(1, most)
                shown += stream.feed(range(at, min(at + size, len(pieces))))
                at += size
            assert shown + stream.finish() == stream.text == want, (pieces, stops, least)


def test_tokens_without_text_leave_the_context_of_the_next_one():
    """Without it, the space before a word that follows an empty token would be lost."""

    def text(ids: list[int]) -> str:
        return "".join(f" {token}" for token in ids if token).removeprefix(" ")

    stream = TextStream(text, [7])
    pieces = [stream.feed([token]) for token in (0, 8, 0, 0, 9)]
    assert pieces == ["", " 8", "", "", " 9"]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("text", ["삼겹살을 먹자", "a 💥\N{FAMILY} é"])
def test_a_character_that_the_prompt_has_begun_belongs_to_the_text(text, size):
    """Wherever the prompt ends: whole characters are its own, the rest is the text's."""
    ids = tokenizer()(text).input_ids
    assert len(ids) > len(text)
    for cut in range(1, len(ids)):
        whole = bytes_of(ids[:cut]).decode(errors="ignore")
        stream = TextStream(text_of, ids[:cut])
        pieces = [stream.feed(ids[at : at + size]) for at in range(cut, len(ids), size)]
        assert "".join([*pieces, stream.finish()]) == stream.text == text.removeprefix(whole)
        stopped = TextStream(text_of, ids[:cut], [text.removeprefix(whole)[0]])
        for token in ids[cut:]:
            stopped.feed([token])
        assert (stopped.stopped, stopped.text) == (True, "")


def test_what_the_prompt_has_begun_may_never_end():
    """Its bytes are the prompt's then."""
    ids = tokenizer()("삼").input_ids
    rest = tokenizer()(" and on").input_ids
    stream = TextStream(text_of, ids[:1])
    assert "".join(stream.feed([token]) for token in rest) + stream.finish() == " and on"
    unfinished = TextStream(text_of, ids[:1])
    assert unfinished.feed(ids[1:2]) + unfinished.finish() == ""
    # the character that tokenizers put there may be the prompt's own
    begun, rest = (tokenizer()(text).input_ids for text in ("a\ufffd", " é\ufffd"))
    stream = TextStream(text_of, begun)
    assert "".join(stream.feed([token]) for token in rest) + stream.finish() == " é\ufffd"


def bytes_of(ids: list[int]) -> bytes:
    """The bytes of tokens of a byte-level tokenizer, by its published alphabet."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {
        chr(256 + at): byte for at, byte in enumerate(hidden)
    }
    spelled = "".join(tokenizer().convert_ids_to_tokens(ids))
    return bytes(byte_of[character] for character in spelled)
