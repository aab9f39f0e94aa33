"""The TCP connector: a receiver fetches announced pages over connections of its own, straight into its own memory."""
