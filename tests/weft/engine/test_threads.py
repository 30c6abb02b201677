"""Many threads at one engine: everybody gets its own text, and random cancels lose nothing."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from tests.weft.engine.harness import Driver
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import FirstToken, SequenceMode
from weft.errors import Overloaded
from weft.request import RequestKey

NUM_THREADS, NUM_ROUNDS = 8, 12


def test_random_cancels_from_many_threads_lose_no_block_and_disturb_nobody(grouped: Tiny) -> None:
    calm = [[3 + (7 * i + j) % 120 for j in range(5 + 9 * i)] for i in range(4)]

    def client(driver: Driver, number: int) -> None:
        dice = random.Random(number)
        for turn in range(NUM_ROUNDS):
            prompt = [dice.randrange(131) for _ in range(dice.randrange(1, 90))]
            mode = dice.choice(list(SequenceMode))
            try:
                key = driver.submit(f"{number}-{turn}", prompt, 50, mode=mode, wait_for_kv=dice.random() < 0.5)
            except Overloaded:
                continue
            for _ in range(dice.randrange(3)):
                action = dice.choice([lambda key: driver.engine.complete_kv(key, 0), driver.engine.release])
                action(key)
            if dice.random() < 0.3:
                driver.engine.complete_kv(key, len(prompt), FirstToken(5), range(dice.randrange(20)))
            driver.engine.cancel(key)
            driver.engine.unquarantine(range(20))

    with Driver(grouped, num_blocks=30, max_waiting=24, chunk_tokens=32) as driver:
        keys = [driver.submit(f"calm-{i}", prompt, 30, cache_salt=b"calm") for i, prompt in enumerate(calm)]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for done in [pool.submit(client, driver, number) for number in range(NUM_THREADS)]:
                done.result()
        assert [driver.wait_end(key).tokens for key in keys] == [grouped.greedy(prompt, 30) for prompt in calm]
        driver.engine.unquarantine(range(30))
        assert driver.generate(calm[0], 5, "last").tokens == grouped.greedy(calm[0], 5)
        driver.assert_all_blocks_are_back()
        assert driver.engine.is_alive
        assert not any(heard.failure for heard in driver.heard.values())
        assert driver.heard[RequestKey("last")].counts is not None
