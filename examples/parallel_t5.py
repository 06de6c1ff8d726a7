"""A T5 over two ranks, through generate.

python examples/parallel_t5.py [MODEL]
torchrun --nproc-per-node 2 examples/parallel_t5.py [MODEL]
"""

import sys

import torch
import transformers

import shoal

if len(sys.argv) > 1:
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    model = transformers.T5ForConditionalGeneration.from_pretrained(sys.argv[1])
    ids = tokenizer("translate English to German: Fish swim in shoals.", return_tensors="pt").input_ids
else:  # random weights and words: nothing to fetch
    torch.manual_seed(0)  # under torchrun every rank must make the same model
    config = transformers.T5Config(d_model=128, d_kv=16, d_ff=256, num_layers=2, num_heads=8, vocab_size=500)
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(2, 500, (1, 12))

settings = {"max_new_tokens": 16, "do_sample": False, "num_beams": 2}
before = model.generate(ids, **settings)
model = shoal.parallelize(model, tp=2)
after = model.generate(ids, **settings)
print(after[0].tolist(), "| the same tokens as the whole model's:", torch.equal(after, before))
