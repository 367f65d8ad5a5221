"""The picture of carpool beside other servers: throughput and p99 against the offered load."""
