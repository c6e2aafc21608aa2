//! The Gaudi driver library `libhl-thunk.so`, bound at run time.

pub mod sys;
