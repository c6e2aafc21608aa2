//! What the verbs promise, asked through the C functions: two queue pairs in one process, whose
//! requests go through the sockets and the engine as those of two processes do.

mod gaudi;
mod harness;

mod atomics;
mod connections;
mod datagrams;
mod drivers;
mod early_writes;
mod errors;
mod forked;
mod notification;
mod one_sided;
mod ports;
mod processes;
mod refusals;
mod registration;
mod send_receive;
mod stopped;
