//! The options for cake workers that run layers, and what they say: a `CakePlacement`.

use std::net::SocketAddr;

use ::cake::wire::CakeVariant;
use anyhow::Result;
use clap::Args;
use net::PeerAddress;

use crate::options::{KeyOptions, heading};
use crate::usage::UsageError;

/// Where layers run, on workers of cake.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = heading::CLUSTER)]
pub struct CakeOptions {
    /// A cake worker that runs layers, with the same --cluster-key. What is sent to it is not encrypted
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub cake_worker: Vec<PeerAddress>,
    /// Use cake workers of this network that wait for layers. Queries are broadcast, or sent to an address
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, require_equals = true)]
    pub cake_discover: Option<Option<SocketAddr>>,
    /// The cake workers expect weights in the form of cake's older versions
    #[arg(long)]
    pub cake_older: bool,
}

/// Workers of cake that run layers.
#[derive(Clone, Debug)]
pub struct CakePlacement {
    pub workers: Vec<PeerAddress>,
    pub discovery: CakeDiscovery,
    /// The layers of each worker, in their order; empty: by their memory.
    pub split: Vec<usize>,
    pub variant: CakeVariant,
    pub key: KeyOptions,
}

/// Which workers are used beside those that are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CakeDiscovery {
    None,
    /// Those that answer a broadcast.
    Network,
    /// Those that answer at this address.
    At(SocketAddr),
}

impl CakePlacement {
    /// `None` if the options ask for no workers of cake.
    pub fn new(options: &CakeOptions, split: &[usize], key: &KeyOptions) -> Result<Option<Self>, UsageError> {
        let CakeOptions { cake_worker, cake_discover, cake_older } = options;
        let discovery = match cake_discover {
            None => CakeDiscovery::None,
            Some(None) => CakeDiscovery::Network,
            Some(Some(address)) => CakeDiscovery::At(*address),
        };
        let refuse = |why: String| Err(UsageError::new(why));
        match (cake_worker.len(), discovery, split.len()) {
            (0, CakeDiscovery::None, _) => match cake_older {
                true => return refuse("--cake-older needs --cake-worker or --cake-discover".to_owned()),
                false => return Ok(None),
            },
            (_, _, 0) => {}
            (workers, CakeDiscovery::None, counts) if counts == workers => {}
            (workers, CakeDiscovery::None, counts) => {
                return refuse(format!("--split has {counts} numbers for {workers} times --cake-worker"));
            }
            _ => return refuse("--split needs an order of the workers: name them with --cake-worker".to_owned()),
        }
        Ok(Some(Self {
            workers: cake_worker.clone(),
            discovery,
            split: split.to_vec(),
            variant: if *cake_older { CakeVariant::Older } else { CakeVariant::Head },
            key: key.clone(),
        }))
    }

    /// Checks that a key is given.
    pub fn check_key(&self) -> Result<()> {
        self.key.check_given()
    }
}
