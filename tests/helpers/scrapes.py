"""Scrapes of /metrics, and the requests that are counted there."""

from prometheus_client.parser import text_string_to_metric_families

from trioengine import SamplingParams

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = list(range(1, 21))
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Scrape:
    """What a scrape said: `value("num_sessions")`, with the prefix left out."""

    def __init__(self, exposition):
        self.families = list(text_string_to_metric_families(exposition))
        self.samples = [sample for family in self.families for sample in family.samples]
        self._values = {(sample.name, *sample.labels.values()): sample.value for sample in self.samples}
        assert len(self._values) == len(self.samples), "no sample is said twice"

    def value(self, name, *labels):
        return self._values["trioengine_" + name, *labels]

    def values(self, *names):
        return [self.value(name) for name in names]

    def by_label(self, name):
        """The counts that are not 0."""
        return {key[1]: value for key, value in self._values.items() if key[0] == "trioengine_" + name and value}

    def histogram(self, name):
        """Count and sum."""
        return self.value(name + "_count"), self.value(name + "_sum")


async def scrape(clients):
    data = await clients.http(SCRAPE)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/plain; version=0.0.4" in head
    return Scrape(body.decode())


def now(clients):
    """The same without a connection: no time passes."""
    return Scrape(clients.server.metrics.render().decode())
