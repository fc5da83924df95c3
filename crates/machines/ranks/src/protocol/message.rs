//! `RankRequest` and `RankReply`: every op, with its fields. The ops of the neuron protocol come first in each table.

use std::net::{IpAddr, SocketAddr};

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::attached::Attached;
use super::bounded::BoundedVec;
use super::error::{ErrorKind, clean};
use super::join::{Activations, JoinTimeouts, Secret};
use super::limits::{FILES_MAX, IMAGES_MAX, POSITIONS_MAX, RANKS_MAX};
use super::output::WireOutput;
use super::plan::WirePlan;
use super::session::{RankStats, WireCapacity, WirePrefix};
use super::shard::ShardSpec;

/// The message of one line: an object with the name of its `op` and that op's fields.
pub trait LineMessage: Serialize + Sized {
    fn op(&self) -> &'static str;

    /// The id of consort's own ops, and of an `error` in reply to one of them.
    fn id(&self) -> Option<u64>;

    /// What follows its line.
    fn attached(&self) -> Option<&Attached>;
    fn attached_mut(&mut self) -> Option<&mut Attached>;

    /// Parses the fields of an op from the line's object; unknown fields are ignored. A `spare` message of the same op
    /// is taken, and its memory is reused. `None`: there is no such op.
    fn parse(op: &str, line: &str, spare: &mut Option<Self>) -> Result<Option<Self>, serde_json::Error>;
}

/// Makes a message type from a table of ops. Each op's fields are parsed directly into their types. Serde's tagged
/// enums first copy the whole line into a tree, which takes sixteen times the memory of a list of small numbers, and
/// cannot tell an unknown op from a bad field.
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

        impl LineMessage for $Message {
            fn op(&self) -> &'static str {
                match self {
                    $(Self::$Variant { .. } => $op,)*
                }
            }

            fn id(&self) -> Option<u64> {
                self.own_id()
            }

            fn attached(&self) -> Option<&Attached> {
                self.own_attached()
            }

            fn attached_mut(&mut self) -> Option<&mut Attached> {
                self.own_attached_mut()
            }

            fn parse(op: &str, line: &str, spare: &mut Option<Self>) -> Result<Option<Self>, serde_json::Error> {
                Ok(Some(match op {
                    $($op => {
                        #[derive(Deserialize)]
                        struct Fields {
                            #[serde(rename = "op")]
                            _op: IgnoredAny, // a second one is refused
                            $($($(#[$attr])* $field: $Type),*)?
                        }
                        let Fields { _op, $($($field),*)? } = match spare.take_if(|spare| spare.op() == op) {
                            Some(Self::$Variant { $($($field),*)? }) => {
                                let mut fields = Fields { _op: IgnoredAny, $($($field),*)? };
                                read_into(line, &mut fields)?;
                                fields
                            }
                            _ => serde_json::from_str(line)?,
                        };
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

fn read_into<'de, T: Deserialize<'de>>(line: &'de str, place: &mut T) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(line);
    T::deserialize_in_place(&mut deserializer, place)?;
    deserializer.end()
}

messages! {
    /// A request from a supervisor, or a foreign leader, to a rank.
    pub enum RankRequest {
        "ping" => Ping,
        /// `comm_id` is NCCL's unique id in hexadecimal digits.
        "init" => Init { comm_id: String },
        "nccl_sanity_check" => NcclSanityCheck,
        "load_dense_shard" => LoadDenseShard {
            model_id: String,
            /// The text of the model's `config.json`.
            config_json: String,
            /// Absolute paths, the same for all ranks.
            safetensors_paths: BoundedVec<String, FILES_MAX>,
            #[serde(skip_serializing_if = "Option::is_none")]
            quant: Option<String>,
        },
        "generate_step" => GenerateStep {
            model_id: String,
            tokens: BoundedVec<u32, POSITIONS_MAX>,
            offset: u64,
        },
        "generate_step_with_images" => GenerateStepWithImages {
            model_id: String,
            tokens: BoundedVec<u32, POSITIONS_MAX>,
            offset: u64,
            image_token_id: u32,
            image_data_uris: BoundedVec<String, IMAGES_MAX>,
            chunk_size: u64,
        },
        "clear_kv_cache" => ClearKvCache { model_id: String },
        "unload_model" => UnloadModel { model_id: String },
        "shutdown" => Shutdown,

        /// The first of consort's own ops: see [`check_hello`](super::check_hello).
        "hello" => Hello { id: u64, protocol: u32, build: String },
        /// Joins the group of a shared-memory segment, whose descriptor the rank has inherited. A loaded model stays;
        /// its sessions are closed.
        "attach" => Attach {
            id: u64,
            segment_fd: u32,
            world_size: u16,
            rank: u16,
            elements_max: u64,
            epoch: u32,
        },
        /// Opens a port on `host`, an address of the rank's machine, to which the other ranks of the next `join`
        /// connect.
        "listen" => Listen { id: u64, host: IpAddr },
        /// As `attach`, in a group on several hosts: connects to the other ranks at their ports.
        "join" => Join {
            id: u64,
            world_size: u16,
            rank: u16,
            epoch: u32,
            /// Addresses of all ranks in their order, as this rank reaches them.
            addresses: BoundedVec<SocketAddr, RANKS_MAX>,
            /// The key of this epoch.
            key: Secret,
            encoding: Activations,
            timeouts: JoinTimeouts,
        },
        /// Loads this rank's shard of a model, for the steps that follow. If the rank is in a group, the model uses
        /// that group.
        "load" => Load { id: u64, model_id: String, shard: ShardSpec },
        "open" => Open { id: u64, tokens_max: u64, prefix: WirePrefix },
        "truncate" => Truncate { id: u64, session: u64, tokens: u64 },
        "close" => Close { id: u64, session: u64 },
        /// Closes all sessions and empties the prefix cache. The weights stay.
        "clear" => Clear { id: u64 },
        "step" => Step { id: u64, plan: WirePlan },
        /// Cancels the request with the id `target`, unless it has begun.
        "cancel" => Cancel { id: u64, target: u64 },
        /// Aborts an epoch of the group: its collectives fail at once.
        "abort" => Abort { id: u64, epoch: u32 },
        "stats" => Stats { id: u64 },
    }
}

messages! {
    /// A rank's reply.
    pub enum RankReply {
        "pong" => Pong { rank: u16, world_size: u16, cuda_device: u32 },
        "init_ok" => InitOk,
        "nccl_sanity_result" => NcclSanityResult { observed_sum: u64 },
        "load_dense_shard_ok" => LoadDenseShardOk,
        "generate_step_ok" => GenerateStepOk,
        "kv_cache_cleared" => KvCacheCleared,
        "unloaded" => Unloaded,
        /// The last reply, before the process exits.
        "bye" => Bye,
        "error" => Error {
            kind: ErrorKind,
            message: String,
            #[serde(skip_serializing_if = "Option::is_none")]
            id: Option<u64>,
        },

        "hello_ok" => HelloOk { id: u64, protocol: u32, build: String, pid: u32 },
        /// The reply to `attach` and `join`.
        "attach_ok" => AttachOk { id: u64 },
        "listening" => Listening { id: u64, port: u16 },
        /// Progress: the number of layers loaded so far. Sent any number of times before `load_ok`.
        "loading" => Loading { id: u64, layers: u64 },
        "load_ok" => LoadOk {
            id: u64,
            capacity: WireCapacity,
            weight_bytes: u64,
            head_bytes: u64,
            kv_bytes: u64,
            /// Identifies the whole model's files as the rank has read them, in hexadecimal digits: see
            /// [`model::Checkpoint::digest`].
            digest: String,
        },
        "opened" => Opened { id: u64, session: u64, computed: u64 },
        "truncated" => Truncated { id: u64, computed: u64 },
        /// The reply to `close` and `clear`.
        "closed" => Closed { id: u64 },
        "step_ok" => StepOk { id: u64, output: WireOutput },
        /// `found`: the target had not begun, and gets no reply.
        "cancelled" => Cancelled { id: u64, found: bool },
        "aborted" => Aborted { id: u64, epoch: u32 },
        "stats_ok" => StatsOk { id: u64, stats: RankStats },
    }
}

impl RankRequest {
    fn own_attached(&self) -> Option<&Attached> {
        match self {
            Self::Step { plan, .. } => plan.activations.as_ref(),
            _ => None,
        }
    }

    fn own_attached_mut(&mut self) -> Option<&mut Attached> {
        match self {
            Self::Step { plan, .. } => plan.activations.as_mut(),
            _ => None,
        }
    }

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
            | Self::Clear { id }
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

impl RankReply {
    /// An error reply to the request with this id, or to one that has none. The message is [cleaned](clean).
    pub fn error(id: Option<u64>, kind: ErrorKind, message: &str) -> Self {
        Self::Error { kind, message: clean(message), id }
    }

    fn own_attached(&self) -> Option<&Attached> {
        match self {
            Self::StepOk { output, .. } => Some(&output.states),
            _ => None,
        }
    }

    fn own_attached_mut(&mut self) -> Option<&mut Attached> {
        match self {
            Self::StepOk { output, .. } => Some(&mut output.states),
            _ => None,
        }
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
