"""A tiny randomly initialised Llama with a character tokenizer, saved as a plain checkpoint: for tests where size is beside the point."""

from pathlib import Path

import torch

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '|' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def tiny_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<end>": 1} | {chr(c): c - 30 for c in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    made.chat_template = TEMPLATE
    return made


def tiny_policy(folder: Path, seed: int = 0, layers: int = 3) -> Path:
    """Folder of a Llama of hidden 64, 4 heads, 2 key-value heads; pad and end-of-sequence token coincide, as in SmolLM2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
