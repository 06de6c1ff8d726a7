"""The demo model over two ranks: one answer streams while other requests share its batch."""

import asyncio
import time

import shoal
from shoal.engine.summary import describe

QUESTION = [{"role": "user", "content": "Explain in a short paragraph why fish swim in shoals."}]
OTHERS = ["The capital of France is", "Once upon a time", "Water boils at", "To bake bread, first"]


async def main() -> None:
    started = time.perf_counter()
    llm = await shoal.AsyncLLM.start(
        "demo", tensor_parallel_size=2, kv_cache_memory_bytes=256 << 20, show_progress=True
    )
    print(f"ready in {time.perf_counter() - started:.1f} s\n\n> {QUESTION[0]['content']}\n")
    greedy = shoal.SamplingParams(temperature=0, max_tokens=96)

    async def other(prompt: str) -> tuple[str, str, int]:
        async for out in llm.generate(prompt, shoal.SamplingParams(temperature=0, max_tokens=24)):
            final = out.outputs[0]
        return prompt, final.text, len(final.token_ids)

    began = time.perf_counter()
    others = [asyncio.create_task(other(prompt)) for prompt in OTHERS]
    tokens = 0
    async for delta in llm.stream(llm.render_chat(QUESTION), greedy):
        print(delta.outputs[0].text, end="", flush=True)
        tokens += len(delta.outputs[0].token_ids)
    finished = await asyncio.gather(*others)
    took = time.perf_counter() - began
    tokens += sum(count for _, _, count in finished)
    print("\n\nmeanwhile, in the same batch:")
    for prompt, text, _ in finished:
        print(f"  {prompt}{text!r}")
    print(f"\n{tokens} tokens of {1 + len(OTHERS)} requests in {took:.1f} s: {tokens / took:.1f} tokens/s")
    print(describe(llm.info))
    await llm.shutdown()


asyncio.run(main())
