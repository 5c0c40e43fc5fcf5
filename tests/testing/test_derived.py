"""Names of a user's machine, and of its objects, that a rule or an attribute of ours has."""

import pytest

from trioengine.testing.fuzz import LifecycleMachine, rule


class Quiet(LifecycleMachine):
    abort = None
    config = LifecycleMachine.config

    def __init__(self):
        super().__init__()
        self.asked = 0

    async def app(self, engine):
        self.asked += 1


class QuieterStill(Quiet):
    cancel = LifecycleMachine.cancel  # the same one

    def __init__(self):
        self.asked = -1  # before ours
        super().__init__()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)

    def make_engine(self, config, ports):
        return super().make_engine(config, ports)

    async def app(self, engine):
        self.asked = 1


@pytest.mark.parametrize("name", ["cancel", "start", "_settle", "may_start", "in_use"])
def test_a_class_with_a_name_of_ours_is_refused(name):
    """It would replace ours: a fault would never be injected, and nothing would be found."""
    with pytest.raises(TypeError, match=rf"^Clash\.{name}: LifecycleMachine has this name already; choose another"):
        type("Clash", (LifecycleMachine,), {name: rule()(lambda self: None), "__module__": __name__})


def test_a_mixin_with_a_name_of_ours_is_refused():
    class Mixin:
        @rule()
        def cancel(self):
            pass

    with pytest.raises(TypeError, match=r"^Clash\.cancel: LifecycleMachine has this name already"):

        class Clash(Mixin, Quiet):
            pass


def test_only_rules_are_switched_off():
    with pytest.raises(TypeError, match=r"^Clash\._settle: LifecycleMachine has this name already"):
        type("Clash", (LifecycleMachine,), {"_settle": None, "__module__": __name__})


@pytest.mark.parametrize("name", ["_sessions", "engine", "loop", "clients", "faults"])
def test_an_object_with_a_name_of_ours_is_refused(name):
    class Clash(LifecycleMachine):
        def __init__(self):
            super().__init__()
            setattr(self, name, [])

    for _ in range(2):  # the first one leaves no loop behind, in which the second one cannot begin
        with pytest.raises(AttributeError, match=rf"^Clash\.{name}: LifecycleMachine has this name already;"):
            Clash()


@pytest.mark.parametrize("name", ["clients", "engine", "calls"])
def test_a_class_with_a_name_of_our_objects_attributes_is_refused(name):
    clash = type("Clash", (Quiet,), {name: [], "__module__": __name__})
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"^Clash\.{name}: LifecycleMachine has this name already;"):
            clash()


@pytest.mark.parametrize("machine", [Quiet, QuieterStill])
def test_names_of_the_users_own_can_be_set_and_overridden(machine):
    made = machine()
    try:
        made.asked += 1
        made.horizon = 5.0
        assert made.asked == 1 and made.abort is None
    finally:
        made.teardown()


def test_an_init_that_fails_before_ours():
    class Broken(LifecycleMachine):
        def __init__(self):
            raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        Broken()
