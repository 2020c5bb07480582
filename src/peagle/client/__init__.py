"""Access to a server with OpenAI's interface: control calls, single streams, counters of drafts.

`api` calls it on httpx. `events` splits a stream into events, `answers` reads events and whole
answers, `counters` the page of metrics. `fields` turns sampling parameters into fields of a
request. The asyncio client that measures load is `evaluation/http_client.py`; it uses the same
`events` and `answers`.
"""
