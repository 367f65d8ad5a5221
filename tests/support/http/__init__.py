"""What the tests of our HTTP share: clients, servers, doors without sockets, and the models behind them."""
