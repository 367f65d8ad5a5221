"""The protocols of other servers, asked as their clients ask."""
