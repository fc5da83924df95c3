//! `/v1/cluster`: where the layers of the model run, what each part of the way takes, and which machines are not used.
//!
//! This crate knows no cluster: whoever runs one implements [`ClusterMonitor`]. A model in one process or on ranks is described
//! from what the engine reports.

mod body;
mod invitation;
mod snapshot;
mod swarm;
mod text;

use std::sync::Arc;

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use utoipa::OpenApi;

use crate::app::SharedApp;
use crate::error::OpenAiErrorBody;
use body::ClusterBody;

pub(crate) use invitation::SharedInviter;
pub use invitation::{InvitationSnapshot, InvitationState, Inviter};
pub use snapshot::{
    BatchPrediction, ChainBits, ChainPrediction, ChainSnapshot, HopSnapshot, HopWay, NodeSnapshot, NodeUse,
    StageMemory, StageSnapshot, StageTime,
};
pub use swarm::{NodePeer, PeerBlock, PeerReach, PeerRecord, PeerService, StagePeer, SwarmSnapshot};
pub(crate) use text::bounded_name;

/// Knows the chain of machines that runs the model. Asked at any time, also before the first chain is formed.
pub trait ClusterMonitor: Send + Sync {
    fn snapshot(&self) -> ChainSnapshot;
}

pub(crate) type SharedMonitor = Arc<dyn ClusterMonitor>;

pub fn router() -> Router<SharedApp> {
    let invitation = get(invitation::show).post(invitation::open).delete(invitation::close);
    Router::new().route("/v1/cluster", get(cluster)).route("/v1/cluster/invitation", invitation)
}

#[derive(OpenApi)]
#[openapi(paths(cluster, invitation::show, invitation::open, invitation::close))]
pub struct ClusterPaths;

/// Where the layers of the model run
#[utoipa::path(
    get, path = "/v1/cluster", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The machines and processes of the model", body = ClusterBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
    )
)]
async fn cluster(State(app): State<SharedApp>) -> Json<ClusterBody> {
    Json(ClusterBody::new(&app))
}
