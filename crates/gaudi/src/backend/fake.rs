//! A back end without a driver, for the engine's own tests: memory in a map, and hardware that
//! does its work when the test says so.
