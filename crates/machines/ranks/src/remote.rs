//! Ranks on other hosts. A [`RankStream`] carries the lines between a supervisor and a rank that [`serve_ranks`] started
//! for it.
//!
//! A host reports over each stream a few times a second whether the rank process is stopped. A supervisor that receives
//! nothing for the silence deadline, which its hello contains, takes the host for lost, and a host that receives nothing
//! from a supervisor ends its rank.
#![cfg(target_os = "linux")]

mod rank_stream;
mod serve;

pub use rank_stream::{RankStream, RankStreamHandle, RankStreamReader, RankStreamWriter};
pub use serve::{RANKS_MAX, RankProcess, serve_ranks};
