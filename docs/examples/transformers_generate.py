"""transformers' ``generate`` with speculative decoding: a batch, a stream, drawn tokens.

python docs/examples/transformers_generate.py
"""

from __future__ import annotations

from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import specattn

FOLDER = str(files("specattn") / "pair" / "target")
PROMPTS = ["def fibonacci(n):\n", "import os\nimport sys\n\nclass Reader:\n    def __init__("]


def main(new: int = 48) -> list[str]:
    """Continue a batch greedily; then stream a text, and draw three."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    tokenizer.pad_token = tokenizer.decode([0])
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    out = model.generate(
        **inputs, max_new_tokens=new, custom_generate=specattn.generate, draft="shipped"
    )
    one = tokenizer(PROMPTS[0], return_tensors="pt")
    # by itself, with a tree of 16 nodes
    tree = specattn.SpecConfig(num_steps=5, topk=4, num_draft_tokens=16)
    specattn.generate(
        model,
        **one,
        max_new_tokens=new,
        draft="shipped",
        spec_config=tree,
        streamer=TextStreamer(tokenizer),
    )
    torch.manual_seed(0)
    drawn = model.generate(
        **one,
        max_new_tokens=new,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        num_return_sequences=3,
        custom_generate=specattn.generate,
        draft="shipped",
    )
    print(*tokenizer.batch_decode(drawn, skip_special_tokens=True), sep="\n---\n")
    length = inputs["input_ids"].shape[1]
    texts: list[str] = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
    return texts


if __name__ == "__main__":
    print(*main(), sep="\n---\n")
