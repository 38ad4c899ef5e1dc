"""A clock that a test moves."""


class FakeClock:
    def __init__(self, unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self.now_ns = unix_ns

    def unix_ns(self) -> int:
        return self.now_ns

    def monotonic_s(self) -> float:
        return self.now_ns / 1e9

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
