"""A transformers model generates a text by itself and patched: the same text, sooner.

By default a Mamba-2 with random weights; --model takes one from the hub or a folder, with its tokenizer.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2Config, Mamba2ForCausalLM

from fulmen.integrations.transformers import patch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="name or folder of a model; default: random weights")
    parser.add_argument("--text", default="The thunderbolt steers all things.", help="the prompt for --model")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the random model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the random model's prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()

    dtype, tokenizer = getattr(torch, options.dtype), None
    if options.model is not None:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompt = tokenizer(options.text, return_tensors="pt").input_ids
    else:
        model = random_mamba2(options.hidden, options.layers).to(dtype)
        prompt = torch.randint(model.config.vocab_size, (1, options.prompt))

    before, own = generate(model, prompt, options.tokens)
    handle = patch(model)
    print(handle)
    after, patched = generate(model, prompt, options.tokens)

    if tokenizer is not None:
        print(tokenizer.decode(after[0]))
    print("the same text" if torch.equal(before, after) else "another text (bfloat16 rounds otherwise)")
    print(f"transformers: {own:.3f} s   patched: {patched:.3f} s   {own / patched:.2f} times as fast")


def random_mamba2(hidden: int, layers: int) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=2 * hidden // 64,
        head_dim=64,
        n_groups=1,
        vocab_size=4096,
        eos_token_id=None,
    )
    return Mamba2ForCausalLM(config).eval()


def generate(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
    """The text, and the seconds it took; once before that, so that nothing is loaded meanwhile."""
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    begin = time.perf_counter()
    text = model.generate(prompt, max_new_tokens=tokens, do_sample=False)
    return text, time.perf_counter() - begin


if __name__ == "__main__":
    main()
