//! `Request` and `Reply`: every op, with its fields. What the neuron protocol has stands first in each table.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::bounded;
use super::error::{ErrorKind, clean};
use super::join::{Activations, JoinTimeouts, Secret};
use super::limits::{FILES_MAX, IMAGES_MAX, POSITIONS_MAX, RANKS_MAX};
use super::output::WireOutput;
use super::plan::WirePlan;
use super::session::{RankStats, WireCapacity, WirePrefix};
use super::share::Share;

/// One line's worth: an object with the name of its `op` and that op's fields.
pub trait Message: Serialize + Sized {
    fn op(&self) -> &'static str;

    /// Of our own ops, and of `error` where it answers one of them.
    fn id(&self) -> Option<u64>;

    /// The fields of an op from the line's object, fields that it does not know apart. `None`: there is no such op.
    fn parse(op: &str, line: &str) -> Result<Option<Self>, serde_json::Error>;
}

/// Makes a message from a table of ops. Each op's fields are read directly into their types: serde's own tagged enums first copy
/// the whole line into a tree, sixteen times as large as a list of small numbers, and can not tell an unknown op from a
/// bad field.
macro_rules! messages {
    ($(#[$meta:meta])* pub enum $Message:ident {
        $($(#[$doc:meta])* $op:literal => $Variant:ident
            $({ $($(#[$attr:meta])* $field:ident: $Type:ty),* $(,)? })?,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(tag = "op")]
        pub enum $Message {
            $($(#[$doc])* #[serde(rename = $op)] $Variant $({ $($(#[$attr])* $field: $Type),* })?,)*
        }

        impl Message for $Message {
            fn op(&self) -> &'static str {
                match self {
                    $(Self::$Variant { .. } => $op,)*
                }
            }

            fn id(&self) -> Option<u64> {
                self.own_id()
            }

            fn parse(op: &str, line: &str) -> Result<Option<Self>, serde_json::Error> {
                Ok(Some(match op {
                    $($op => {
                        #[derive(Deserialize)]
                        struct Fields { $($($(#[$attr])* $field: $Type),*)? }
                        let Fields { $($($field),*)? } = serde_json::from_str(line)?;
                        Self::$Variant $({ $($field),* })?
                    })*
                    _ => return Ok(None),
                }))
            }
        }

        impl $Message {
            /// Every op, in the order of the table.
            pub const OPS: &[&str] = &[$($op),*];
        }
    };
}

messages! {
    /// What a leader asks of a rank.
    pub enum Request {
        "ping" => Ping,
        /// `comm_id` is NCCL's unique id in hexadecimal digits.
        "init" => Init { comm_id: String },
        "nccl_sanity_check" => NcclSanityCheck,
        "load_dense_shard" => LoadDenseShard {
            model_id: String,
            /// The text of the model's `config.json`.
            config_json: String,
            /// Absolute, and the same for all ranks.
            #[serde(deserialize_with = "bounded::list::<FILES_MAX, _, _>")]
            safetensors_paths: Vec<String>,
            #[serde(skip_serializing_if = "Option::is_none")]
            quant: Option<String>,
        },
        "generate_step" => GenerateStep {
            model_id: String,
            #[serde(deserialize_with = "bounded::list::<POSITIONS_MAX, _, _>")]
            tokens: Vec<u32>,
            offset: u64,
        },
        "generate_step_with_images" => GenerateStepWithImages {
            model_id: String,
            #[serde(deserialize_with = "bounded::list::<POSITIONS_MAX, _, _>")]
            tokens: Vec<u32>,
            offset: u64,
            image_token_id: u32,
            #[serde(deserialize_with = "bounded::list::<IMAGES_MAX, _, _>")]
            image_data_uris: Vec<String>,
            chunk_size: u64,
        },
        "clear_kv_cache" => ClearKvCache { model_id: String },
        "unload_model" => UnloadModel { model_id: String },
        "shutdown" => Shutdown,

        /// The first of ours: see [`check_hello`](super::check_hello).
        "hello" => Hello { id: u64, protocol: u32, build: String },
        /// Joins the group of a shared-memory segment, whose descriptor the rank has inherited. A model that is loaded
        /// stays; its sessions are gone.
        "attach" => Attach {
            id: u64,
            segment_fd: u32,
            world_size: u16,
            rank: u16,
            elements_max: u64,
            epoch: u32,
        },
        /// Opens a port of `host`, an address of the rank's own, for the other ranks of a group that is to be joined.
        "listen" => Listen { id: u64, host: IpAddr },
        /// As `attach`, in a group of several hosts: connects with the other ranks at their ports.
        "join" => Join {
            id: u64,
            world_size: u16,
            rank: u16,
            epoch: u32,
            /// Of all ranks in their order, as this one reaches them.
            #[serde(deserialize_with = "bounded::list::<RANKS_MAX, _, _>")]
            addresses: Vec<SocketAddr>,
            /// Of this epoch.
            key: Secret,
            encoding: Activations,
            patience: JoinTimeouts,
        },
        /// Loads this rank's share of a model, which steps then run. A rank that is in a group already loads for that group.
        "load" => Load { id: u64, model_id: String, share: Share },
        "open" => Open { id: u64, tokens_max: u64, prefix: WirePrefix },
        "truncate" => Truncate { id: u64, session: u64, tokens: u64 },
        "close" => Close { id: u64, session: u64 },
        "step" => Step { id: u64, plan: WirePlan },
        /// The request with the id `target` need not be run any more, if it has not begun.
        "cancel" => Cancel { id: u64, target: u64 },
        /// Ends an epoch of the group: its collectives give way at once, its requests are stale.
        "abort" => Abort { id: u64, epoch: u32 },
        "stats" => Stats { id: u64 },
    }
}

messages! {
    /// What a rank answers.
    pub enum Reply {
        "pong" => Pong { rank: u16, world_size: u16, cuda_device: u32 },
        "init_ok" => InitOk,
        "nccl_sanity_result" => NcclSanityResult { observed_sum: u64 },
        "load_dense_shard_ok" => LoadDenseShardOk,
        "generate_step_ok" => GenerateStepOk,
        "kv_cache_cleared" => KvCacheCleared,
        "unloaded" => Unloaded,
        /// The last reply: the process ends.
        "bye" => Bye,
        "error" => Error {
            kind: ErrorKind,
            message: String,
            #[serde(skip_serializing_if = "Option::is_none")]
            id: Option<u64>,
        },

        "hello_ok" => HelloOk { id: u64, protocol: u32, build: String, pid: u32 },
        /// To `attach` and `join`.
        "attach_ok" => AttachOk { id: u64 },
        "listening" => Listening { id: u64, port: u16 },
        /// So many layers are there. Comes any number of times before `load_ok`.
        "loading" => Loading { id: u64, layers: u64 },
        "load_ok" => LoadOk { id: u64, capacity: WireCapacity, weight_bytes: u64, head_bytes: u64, kv_bytes: u64 },
        "opened" => Opened { id: u64, session: u64, computed: u64 },
        "truncated" => Truncated { id: u64, computed: u64 },
        "closed" => Closed { id: u64 },
        "step_ok" => StepOk { id: u64, output: WireOutput },
        /// `found`: the target had not begun, and will not be answered.
        "cancelled" => Cancelled { id: u64, found: bool },
        "aborted" => Aborted { id: u64, epoch: u32 },
        "stats_ok" => StatsOk { id: u64, stats: RankStats },
    }
}

impl Request {
    fn own_id(&self) -> Option<u64> {
        match *self {
            Self::Hello { id, .. }
            | Self::Attach { id, .. }
            | Self::Listen { id, .. }
            | Self::Join { id, .. }
            | Self::Load { id, .. }
            | Self::Open { id, .. }
            | Self::Truncate { id, .. }
            | Self::Close { id, .. }
            | Self::Step { id, .. }
            | Self::Cancel { id, .. }
            | Self::Abort { id, .. }
            | Self::Stats { id } => Some(id),
            Self::Ping
            | Self::Init { .. }
            | Self::NcclSanityCheck
            | Self::LoadDenseShard { .. }
            | Self::GenerateStep { .. }
            | Self::GenerateStepWithImages { .. }
            | Self::ClearKvCache { .. }
            | Self::UnloadModel { .. }
            | Self::Shutdown => None,
        }
    }
}

impl Reply {
    /// To the request with this id, or to one that has none. The message is [cleaned](clean).
    pub fn error(id: Option<u64>, kind: ErrorKind, message: &str) -> Self {
        Self::Error { kind, message: clean(message), id }
    }

    fn own_id(&self) -> Option<u64> {
        match *self {
            Self::Error { id, .. } => id,
            Self::HelloOk { id, .. }
            | Self::AttachOk { id }
            | Self::Listening { id, .. }
            | Self::Loading { id, .. }
            | Self::LoadOk { id, .. }
            | Self::Opened { id, .. }
            | Self::Truncated { id, .. }
            | Self::Closed { id }
            | Self::StepOk { id, .. }
            | Self::Cancelled { id, .. }
            | Self::Aborted { id, .. }
            | Self::StatsOk { id, .. } => Some(id),
            Self::Pong { .. }
            | Self::InitOk
            | Self::NcclSanityResult { .. }
            | Self::LoadDenseShardOk
            | Self::GenerateStepOk
            | Self::KvCacheCleared
            | Self::Unloaded
            | Self::Bye => None,
        }
    }
}
