import pytest

from fulmen.lab.crew import Crew


@pytest.fixture(scope="session")
def crew():
    made = Crew(4)
    yield made
    made.close()
