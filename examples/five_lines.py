"""The shortest program: one prompt over two ranks. Runs as a file, by python -c, and under torchrun."""

import shoal

with shoal.LLM("demo", tensor_parallel_size=2) as llm:
    for out in llm.generate(["Hello"], shoal.SamplingParams(max_tokens=32)):
        print(out.outputs[0].text)
