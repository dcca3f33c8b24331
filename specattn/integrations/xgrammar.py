"""Grammars of xgrammar for requests: JSON schemas and regular expressions.

The extra ``grammar`` installs xgrammar.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import xgrammar

from specattn.engine.detokenizer import end_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from specattn.speculative.model import TargetModel


class XGrammar:
    """A `Grammar` of one text, over a matcher of xgrammar.

    A text that has matched as a whole can only end; after its end anything may follow.

    Parameters
    ----------
    compiled : xgrammar.CompiledGrammar
        What it must match; texts may share it.
    """

    def __init__(self, compiled: Any) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)

    def fill(self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor) -> None:
        """Say which tokens may follow each node, as `Grammar.fill` has it."""
        if self._matcher.is_terminated():
            return
        children, siblings = [-1] * len(tokens), [-1] * len(tokens)
        for node in range(len(tokens) - 1, 0, -1):
            parent = parents[node]
            if parent >= 0:
                siblings[node], children[parent] = children[parent], node
        links = torch.tensor(children), torch.tensor(siblings)
        self._matcher.traverse_draft_tree(*links, torch.tensor(tokens), bitmask)
        # after an end nothing follows, and a row must leave something
        bitmask[(bitmask == 0).all(1)] = -1

    def accept(self, tokens: Sequence[int]) -> None:
        """Note that the text goes on with these tokens."""
        for token in tokens:
            if not self._matcher.is_terminated():
                self._matcher.accept_token(token)


class XGrammarCompiler:
    """Compiles what texts must match, for ``Request(grammar=...)``.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizer
        The target's.
    target : TargetModel
        Its vocabulary, and the tokens that end a text. The tokenizer's own ends do, too, so an
        engine has to have the same tokenizer.

    Raises
    ------
    ValueError
        If the target has no end-of-text token.
    """

    def __init__(self, tokenizer: Any, target: TargetModel) -> None:
        if not (ends := end_ids(target, tokenizer)):
            raise ValueError("a grammar needs a target with an end-of-text token, got one without")
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(
                tokenizer,
                vocab_size=target.vocab_size,
                stop_token_ids=sorted(ends),
            )
        )

    def json_schema(self, schema: str | Mapping[str, Any]) -> Callable[[], XGrammar]:
        """Return what makes the grammar of a schema's values, on one line.

        Parameters
        ----------
        schema : str or mapping
            The JSON schema, as text or as an object.

        Raises
        ------
        ValueError
            If xgrammar does not compile it.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return self._made("schema", self._compiler.compile_json_schema, text, any_whitespace=False)

    def regex(self, pattern: str) -> Callable[[], XGrammar]:
        """Return what makes the grammar of a regular expression.

        Parameters
        ----------
        pattern : str
            What the whole text must match.

        Raises
        ------
        ValueError
            If xgrammar does not compile it.
        """
        return self._made("pattern", self._compiler.compile_regex, pattern)

    @staticmethod
    def _made(
        name: str, compiler: Callable[..., Any], text: str, **options: Any
    ) -> Callable[[], XGrammar]:
        try:
            return partial(XGrammar, compiler(text, **options))
        except RuntimeError as problem:
            # the place in xgrammar's source comes before what is wrong
            reason = str(problem).partition(".cc:")[2].partition(": ")[2].strip() or str(problem)
            raise ValueError(f"{name} must be one that xgrammar compiles: {reason}") from problem
