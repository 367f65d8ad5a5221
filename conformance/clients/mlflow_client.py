"""mlflow: the client of its scoring server."""

from importlib.metadata import version

import pandas as pd
from calls import ADDRESS, call, raises, tell
from mlflow.pyfunc.scoring_server.client import ScoringServerClient

host, port = ADDRESS.split(":")
client = ScoringServerClient(host, int(port))


@call
def ping():
    client.ping()  # raises if it is not well


@call
def get_version():
    assert client.get_version()


@call
def invoke_a_data_frame():
    told = client.invoke(pd.DataFrame({"rooms": [2.0, 3.0], "area": [10.0, 20.0]}))
    assert told.get_predictions()[0].tolist() == [20.0, 60.0]


@call
def errors_are_its_exceptions():
    raises(Exception, lambda: client.invoke(pd.DataFrame({"rooms": ["many"], "area": [1.0]})))


tell("mlflow-skinny", version("mlflow-skinny"))
