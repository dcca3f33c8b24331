"""``specattn inspect``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from specattn.batch import Candidates
from specattn.cli.errors import refuse
from specattn.cli.loading import drafts_itself
from specattn.cli.options import (
    NOT_TOP_K,
    SPECULATION,
    DraftTokensOption,
    ModelCommand,
    PromptArgument,
    option,
)
from specattn.cli.prompts import read_prompts
from specattn.config import AttnConfig

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import AcceptResult, DraftTree
    from specattn.cli.loading import Models
    from specattn.cli.prompts import Prompts
    from specattn.config import SpecConfig
    from specattn.engine.engine import Engine


_TOPK = f"Branches kept at every depth; 1 is a chain. {NOT_TOP_K}"


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelCommand):
    """Show the tree, mask and KV slots of a prompt's first step."""

    prompt: PromptArgument = None
    topk: Annotated[int, option(SPECULATION, _TOPK)] = 2
    steps: Annotated[int, option(SPECULATION, "Depth of the draft tree.")] = 3
    draft_tokens: DraftTokensOption = None

    def run(self) -> None:
        """Run the step, and print pictures of it."""
        from specattn import inspect as pictures
        from specattn.backends.fastest import considered
        from specattn.speculative.proposers.drafts import draft_of

        found, kind = read_prompts(self.prompt, None), self.draft_kind
        no_head = self.target is not None and self.draft is None
        no_head = no_head and not (kind == "eagle3" and drafts_itself(self.target or ""))
        refuse(
            (not self.steps, "--steps", "must be at least 1: plain decoding has no tree"),
            (
                kind not in ("eagle3", "model"),
                "--draft-kind",
                f"must be eagle3 or model here, got {kind!r}",
            ),
            (no_head, "--draft", "is needed with --target"),
        )
        config = self.shape(self.topk, self.steps, self.draft_tokens)
        models = self.load(speculative=True)
        config = config.reserving(draft_of(models.draft).draft_len(config))
        limit = max(models.target.max_context_len - config.reserve_len, 0)
        (ids,) = found.encode(models.tokenizer, models.target.vocab_size, limit)
        tree, scores, accepted, engine = _first_step(models, found, ids, config, self.backend)
        print(f"tree of {config.num_draft_tokens} nodes after {len(ids)} tokens (* accepted)")
        print(pictures.tree(tree, models.tokenizer, scores=scores, accepted=accepted))
        print("\nmask: row i sees tail key j (#) where node j is i or an ancestor of i")
        print(pictures.mask(tree.words[0], len(ids)))
        print("\nKV slots")
        print(pictures.kv_map(engine.table, config))
        print("\nattention")
        for forward, name in _attending(engine).items():
            print(f"{forward:13}  {name}")
        if self.backend == "auto":
            layers = [one for one in models.target.layers if isinstance(one, AttnConfig)]
            for choice, reasons in considered(layers, self.place).items():
                print(choice.told(reasons))


def _attending(engine: Engine) -> dict[str, str]:
    """Return which backend serves each forward of one request."""
    target, draft = engine.target.backend, engine.draft
    layouts = {mode.value: layout for mode, layout in engine.config.layouts().items()}
    found = {"prompts": target.attending(layouts["decode"], 1, prompts=True)}
    for name, layout in layouts.items():
        slots = draft if name.startswith("draft") else engine.target
        if slots is not None:
            found[name.replace("_", " ")] = slots.backend.attending(layout, 1)
    return found


def _first_step(
    models: Models, prompt: Prompts, ids: list[int], config: SpecConfig, backend: str
) -> tuple[DraftTree, Tensor, AcceptResult, Engine]:
    """Run a prompt, draft a tree and verify it greedily; commit nothing.

    Returns the tree of one request, its nodes' path probabilities ``[1, n]``, what greedy
    verification keeps, and the engine.
    """
    import torch

    from specattn.engine.engine import Engine
    from specattn.engine.request import Request
    from specattn.inspect import path_scores

    context = len(ids) + config.reserve_len
    config = replace(config, max_context_len=context, max_num_reqs=1)
    engine = Engine(models.target, models.draft, config, backend=backend, graphs=False)
    prompt.check_finite(engine.add([Request(ids, max_new_tokens=2, ignore_eos=True)]))
    (one,) = engine.running
    engine.table.reserve([one.row], [context])
    lens = torch.tensor([one.length], dtype=torch.int32)
    with torch.no_grad():
        step = engine.decoder(config).phases([one.row], seq_lens_cpu=lens)
        step.begin()
        candidates = step.propose()
        assert isinstance(candidates, Candidates)
        tree = step.build_tree(candidates)
        logits, _ = step.verify(tree)
        accepted = step.accept(tree, logits)
    return tree, path_scores(candidates, config), accepted, engine
