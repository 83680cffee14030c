"""How fast threads get items into a queue, beside other ways from threads to asyncio, in one run."""
