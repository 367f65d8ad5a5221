"""The options of `carpool simulate`, and what each of them means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from carpool.simulate.scaling import USUAL_RULE


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user wants to be simulated; texts are read by the file that knows their form.

    Attributes:
        policy: The policies, separated by commas: adaptive, greedy, static:10ms,
            static:10ms,max_queued_batches=10, static:10ms,from_idle=yes, aimd, cork, deadline
            (which is told the true cost). Or what other systems do: window:10ms (mosec, LitServe,
            TorchServe), ray:10ms, triton:10ms, symphony, clockwork, batch, and tuned, the best
            static settings in hindsight. With --steps: paced, greedy, static. If not given, one of
            each that services have.
        arrivals: When requests come: poisson:rate=800, gamma:rate=800,cv=2,
            mmpp:rates=200/2000,mean_dwell=1s/500ms, sine:rho=0.6,swing=0.5,
            flash:rho=0.2,peak_rho=2,between=0.4/0.55, bursts:rate=800,mean_burst=8,
            closed:clients=16,think=1ms, or several of them joined by +. Instead of rate, in
            requests per second, you can give rho, a share of what the workers can serve. The
            default is poisson:rate=800, unless there is a trace.
        cost: How long a batch of n takes: affine:a=8ms,b=0.25ms (the default), costs.json as
            carpool profile writes it, tile:a=3ms,step=4ms,width=16, sqrt:c=5ms,
            knee:a=8ms,b=0.25ms,knee=32,extra=0.9ms, table:1=8ms,64=24ms or table:costs.csv,
            followed by +noisy:sigma=0.25 or +drifting:factors=1/1.8/1.2 if you like. Where a batch
            is padded to its longest item, of length L: padded:a=2ms,b=20us,c=0us,e=0us, which is a
            + b n L + c n L^2 + e n, or a table by size and length,
            table:1x16=8ms,1x128=9ms,64x16=20ms,64x128=90ms or a file with three columns;
            +sorted:size=8 stands for code of yours that sorts a batch by length and runs it in
            parts of 8. Repeat the option for each further stage. With --steps:
            steps:a=5ms,b=0.1ms,c=18ms,d=0.15ms (the default), where starting requests takes a + b
            times their length, and a step of n of them c + d times n. Add
            sigma=0.3,stall_share=0.002,stall=1s for noise and stalls.
        service: Simulate the graph of a service, as module:attribute, whose stages have the batch
            limits, workers and queues that they are declared with. Then --cost is a file of carpool
            profile, or STAGE=affine:a=8ms,b=0.25ms for each stage, or one for all.
        ways: With --service: the share of the items that take each branch of a Route:
            en=0.8,de=0.2. Branches that are not named share the rest evenly.
        early: With --service: the share of the items for which a stage answers early, with Done:
            small=0.8.
        items: With --service: how long the lists are that come to a ForEach: 4, or 1/4/16 where
            each list has one of these lengths. 4 if not given.
        slo: The time within which a request should be answered, 60ms if not given. With 30ms/120ms
            each request has one of the two; none means no limit. With --steps it is the time to the
            first part, 1s if not given.
        max_batch_size: The most requests in a batch, 64 if not given. Give one number, or one for
            each stage. With --steps: the most streams in a running set.
        workers: How many workers a stage has, 1 if not given. Give one number, or one for each
            stage. With 1-8 it has one at first, and workers come and go with the load; the table
            then has their seconds, and --plot draws their number over time.
        start_s: The seconds until a worker that is added takes requests.
        scaling: By which rule workers come and go: load, as in services, by what comes and what
            batches cost; ongoing:2, by the requests that are inside (Ray Serve); or busy:0.7, by
            the share of time in which workers are busy.
        duration: How long requests arrive: 30s if not given, or as long as the trace.
        settle: For how long at the beginning requests are left out of the figures, so that a cold
            start does not count.
        seed: The first seed.
        seeds: The number of runs, each with another seed, over which every figure is averaged.
        trace: Replay a CSV file: trace.csv at its own speed, trace.csv,speed=2 or trace.csv,rho=0.7
            at another one. trace.csv,column=TIMESTAMP,size=TOKENS says which columns hold the times
            and the weights; length=TOKENS takes the lengths from one.
        weights: How much requests weigh, where they differ: pareto:shape=1.7,cap=50.
        weights_known: Tell the policy the weights; the batch limit then counts them.
        lengths: How long requests are, where batches are padded to their longest:
            lognormal:input=14,input_sigma=0.8,most_input=512,
            bimodal:short=10,long=200,long_share=0.1, fixed:14, file:lengths.txt, or
            file:requests.csv,column=TOKENS. With --steps: how long inputs and answers are:
            lognormal:input=200,output=180 (the default there),
            exponential:least_input=8,most_input=64,output=32, fixed:input=1,output=30 or
            trace:requests.csv,input=ContextTokens,output=GeneratedTokens.
        lengths_unknown: Do not tell the policies the lengths, so that they batch as in a stage
            without length=.
        max_padded_size: The most that a batch's count times its longest length may be. No limit if
            not given.
        allowed_lengths: The lengths that batches are padded to, separated by commas, as for models
            that are compiled for each shape: 32,64,128. If not given, each batch is padded to its
            longest.
        keys: How many keys there are, if only requests with equal keys may share a batch: 16, or
            zipf:count=100,power=1 where few of them are asked for often, or turn:100 where they
            follow each other in a circle.
        max_workers_per_key: The most workers that may serve one key at the same time. No limit if
            not given.
        switch: How much longer a batch takes if the one before on its worker had another key.
        max_queue_size: The most requests that may wait; further ones are refused. No limit if not
            given.
        hop: How long a batch travels to its worker and back. Some 300us to 400us with worker
            processes; your server's own is carpool_policy_hop_seconds in its /metrics.
        hop_item: How much longer it travels for each of its items, as where these are megabytes.
        turn: How long the driver collects events before it decides; about 0s in our servers.
        coordinator: How long the process that reads requests and writes batches works for each
            request, and for each batch besides: 12us,63us in a service of a trivial model. It takes
            no time if not given. Add way=28us,sigma=0.35,stall_share=0.05%,stall=1.5ms for the way
            to its workers, client=8us for each request of the process that runs the clients of
            closed loops, and slice=3ms,pause=2ms where it shares its core with others.
        ahead: Send a full batch to its worker shortly before the worker is free, so that it spends
            no time on the way.
        steps: Simulate a model that answers step by step, which requests join and leave at every
            step. There are no options then for weights, keys, queues, hops, turns, batches ahead
            and pictures.
        part_slo: With --steps: how far apart the parts of an answer should be on average; none
            gives the policy no goal.
        learned: With --steps: have policies learn the costs from what they see. If not, they know
            them.
        jobs: How many runs to make at the same time; 0 means one for each core that the process
            may use.
        plot: Draw goodput and latency against load, the batch sizes, and latency by length if
            requests have lengths, into this .png, .svg or .html file. For this the arrivals are
            scaled to loads from 0.1 to 1.5, with one run each.
        as_json: Print JSON instead of the table.
    """

    policy: str | None = None
    arrivals: str | None = None
    cost: Annotated[list[str] | None, Parameter(negative=())] = None
    service: str | None = None
    ways: str | None = None
    early: str | None = None
    items: str | None = None
    slo: str | None = None
    max_batch_size: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None
    workers: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None
    start_s: float = 0.0
    scaling: str = USUAL_RULE
    duration: str | None = None
    settle: str = "0s"
    seed: int = 0
    seeds: int = 5
    trace: str | None = None
    weights: str | None = None
    weights_known: Annotated[bool, Parameter(negative=())] = False
    lengths: str | None = None
    lengths_unknown: Annotated[bool, Parameter(negative=())] = False
    max_padded_size: int | None = None
    allowed_lengths: str | None = None
    keys: str | None = None
    max_workers_per_key: int | None = None
    switch: str = "0s"
    max_queue_size: int | None = None
    hop: str = "0s"
    hop_item: str = "0s"
    turn: str = "0s"
    coordinator: str | None = None
    ahead: Annotated[bool, Parameter(negative=())] = False
    steps: Annotated[bool, Parameter(negative=())] = False
    part_slo: str = "50ms"
    learned: Annotated[bool, Parameter(negative=())] = False
    jobs: int = 0
    plot: Path | None = None
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False
