//! A Gaudi in software: the driver library's C functions, and behind them a machine with several
//! cards, their memory, MMU, command processors and dma-bufs.
//!
//! Built as a shared object that programs load in place of `libhl-thunk.so`. Everything above the
//! driver's C interface is real; everything below it is here. `docs/software-gaudi.md` says what is
//! faithful, what is not, and how to configure it.
//!
//! From the outside in: [`api`] has the C functions; `context` is what an open card is; `engine`
//! runs its queues with `processor` and `packet`; `address_space` says what device addresses mean;
//! `node` is the machine that processes share.
//!
//! As a Rust library the crate offers [`dmabuf::Exported`], with which other software devices reach
//! memory that was exported as a dma-buf, and to `pci-gaudi`, the same card behind a PCI bus, the
//! decoder of packets ([`packet`]), the command processor ([`processor`]) and the sync manager
//! ([`sync_manager`]). [`testing`] is for tests of programs on it.

pub mod abi;
pub mod api;
pub mod asic;
pub mod config;
pub mod dmabuf;
pub mod dram;
pub mod packet;
pub mod processor;
pub mod sync_manager;
pub mod testing;

mod address_space;
mod blocks;
mod bus;
mod card_memory;
mod command_buffers;
mod context;
mod dma_core;
mod engine;
mod events;
mod faults;
mod foreign;
mod guarded;
mod interrupts;
mod node;
mod ownership;
mod parser;
mod pinning;
mod posted;
mod queue;
mod registers;
mod ring;
mod signals;
mod state;
mod submission;
mod timing;
mod va;
mod workers;
