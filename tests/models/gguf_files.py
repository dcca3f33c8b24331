"""Writes tiny models of the llama architecture as GGUF files, by the package `gguf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

ENDS = ["<|end|>", "<|start|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o")]
TOKENS = [
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *("".join(pair) for pair in MERGES),
    *ENDS,
]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


def tiny(layers: int = 3) -> torch.nn.Module:
    """A random model, whose matrices lie on the grid of Q8_0."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=TOKENS.index(ENDS[-1]),
        eos_token_id=TOKENS.index(ENDS[0]),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.05)
                continue
            # 32 numbers of a byte have one scale, which the largest tells: here a power of two
            blocks = (weight.reshape(-1, 32) * 512).round().clamp(-127, 127)
            blocks[:, 0] = 127
            weight.copy_((blocks / 512).reshape(weight.shape))
    return model.eval()


def save(model: torch.nn.Module, folder: Path) -> Path:
    """Save the model beside its tokenizer, as transformers has them."""
    tokenizer = Tokenizer(BPE({token: at for at, token in enumerate(TOKENS)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ENDS])
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        bos_token="<|start|>",
        chat_template=TEMPLATE,
    )
    model.save_pretrained(folder)
    saved.save_pretrained(folder)
    return folder


def write(
    model: torch.nn.Module, path: Path, *, q8: bool = False, split: int = 0, **fields: str | int
) -> Path:
    """Write a model, its tokens and chat template; ``fields`` are further texts and numbers.

    With ``split`` the file says that it is the first of so many.
    """
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in ENDS else 1 for token in TOKENS])  # control, normal
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_chat_template(TEMPLATE)
    if split:
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", split)
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)
    _add_tensors(writer, model, q8=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer, model: torch.nn.Module, *, q8: bool) -> None:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {
        "q_proj.weight": model.config.num_attention_heads,
        "k_proj.weight": model.config.num_key_value_heads,
    }
    for name, tensor in model.state_dict().items():
        # the halves that rope turns lie side by side in these files
        if count := heads.get(".".join(name.split(".")[-2:])):
            rows = tensor.reshape(count, 2, -1, tensor.shape[1])
            tensor = rows.transpose(1, 2).reshape(tensor.shape)
        short, data = names.get_name(name, (".weight",)) or name[6:] + ".weight", tensor.numpy()
        if q8 and tensor.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(short, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, data)
