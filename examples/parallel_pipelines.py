"""transformers pipelines over two ranks: a text-generation and a fill-mask one.

python examples/parallel_pipelines.py [TEXT_MODEL [MASKED_MODEL]]
torchrun --nproc-per-node 2 examples/parallel_pipelines.py [TEXT_MODEL [MASKED_MODEL]]
"""

import sys

import torch
import transformers

import shoal
from shoal.checkpoint.source import resolve


def tiny_bert() -> transformers.Pipeline:
    """A random model with a few words: nothing to fetch."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fish", "swim", "in", "the", "sea", "birds", "fly"]
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    torch.manual_seed(0)  # under torchrun every rank must make the same model
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()
    return transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)


text_model = sys.argv[1] if len(sys.argv) > 1 else str(resolve("demo"))
pipe = transformers.pipeline("text-generation", model=text_model)
before = pipe("Fish swim in shoals because", max_new_tokens=12, do_sample=False)
pipe.model = shoal.parallelize(pipe.model, tp=2)
after = pipe("Fish swim in shoals because", max_new_tokens=12, do_sample=False)
print(after[0]["generated_text"], "| the same tokens as the whole model's:", after == before)

pipe = transformers.pipeline("fill-mask", model=sys.argv[2]) if len(sys.argv) > 2 else tiny_bert()
before = [guess["token_str"] for guess in pipe(f"fish {pipe.tokenizer.mask_token} in the sea")]
pipe.model = shoal.parallelize(pipe.model, tp=2)
after = [guess["token_str"] for guess in pipe(f"fish {pipe.tokenizer.mask_token} in the sea")]
print(after, "| the same tokens as the whole model's:", after == before)
