"""What the tests of our HTTP share: clients, servers, fronts without sockets, and the models behind them."""
