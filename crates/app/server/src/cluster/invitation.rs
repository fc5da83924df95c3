//! `/v1/cluster/invitation`: lets another machine join the cluster of this one, with a code that a person carries over.
//!
//! This crate knows no cluster: whoever has its key implements [`Inviter`]. The code is as good as the key while the invitation
//! is open, so it is shown to who has an API key, and on a server without keys to programs on this machine and to the page that
//! this server itself serves there.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::header::{HOST, ORIGIN};
use axum::http::request::Parts;
use serde::Serialize;
use utoipa::ToSchema;

use super::text::{bounded_address, bounded_name, bounded_reason};
use crate::app::SharedApp;
use crate::blocking;
use crate::error::{ApiError, ApiErrorKind, OpenAiErrorBody};
use crate::local_operator::{LocalOperator, RemoteAddress};

/// Opens invitations. One is open at a time.
pub trait Inviter: Send + Sync {
    /// Opens an invitation, or returns the open one. An error is for people.
    fn open(&self) -> Result<InvitationSnapshot, String>;

    /// The last invitation, open or not.
    fn last(&self) -> Option<InvitationSnapshot>;

    /// Closes the open invitation, if there is one.
    fn close(&self);
}

pub(crate) type SharedInviter = Arc<dyn Inviter>;

/// An invitation at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvitationSnapshot {
    /// The name of this machine, as others see it.
    pub name: String,
    /// Where it is open.
    pub port: u16,
    /// Addresses of this machine in its networks, best first.
    pub addresses: Vec<IpAddr>,
    /// Whether machines of this network find it by themselves.
    pub is_announced: bool,
    pub tries_left: u8,
    pub state: InvitationState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvitationState {
    Open {
        /// Six digits.
        code: String,
        seconds_left: u64,
    },
    /// A machine was sent the key.
    Joined {
        name: String,
        address: String,
    },
    Closed {
        why: String,
    },
}

/// An invitation for another machine to join the cluster
#[derive(Serialize, ToSchema)]
#[schema(as = Invitation)]
pub struct InvitationBody {
    /// `open`, `joined` or `closed`
    #[schema(value_type = String)]
    state: &'static str,
    /// Six digits, to be typed on the other machine; null unless it is open
    code: Option<String>,
    /// Until it closes by itself; null unless it is open
    seconds_left: Option<u64>,
    /// How many wrong codes it takes until it closes
    tries_left: u8,
    /// The command for the other machine, where it finds this one by itself
    command: String,
    /// The same for other networks
    command_with_address: Option<String>,
    /// The name of this machine
    name: String,
    port: u16,
    /// The machine that has joined
    joined: Option<JoinedBody>,
    /// Why it is closed
    reason: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = JoinedMachine)]
pub struct JoinedBody {
    /// The machine's own name for itself
    name: String,
    address: String,
}

impl From<InvitationSnapshot> for InvitationBody {
    fn from(snapshot: InvitationSnapshot) -> Self {
        let InvitationSnapshot { name, port, addresses, is_announced, tries_left, state } = snapshot;
        let address = addresses.first().map(|&address| std::net::SocketAddr::new(address, port));
        let with_address = address.map(|address| format!("consort join {address}"));
        let command = "consort join".to_owned();
        let body = Self {
            state: "closed",
            code: None,
            seconds_left: None,
            tries_left,
            command: if is_announced { command } else { with_address.clone().unwrap_or(command) },
            command_with_address: with_address,
            name: bounded_name(&name),
            port,
            joined: None,
            reason: None,
        };
        match state {
            InvitationState::Open { code, seconds_left } => {
                Self { state: "open", code: Some(code), seconds_left: Some(seconds_left), ..body }
            }
            InvitationState::Joined { name, address } => {
                let joined = JoinedBody { name: bounded_name(&name), address: bounded_address(&address) };
                Self { state: "joined", joined: Some(joined), ..body }
            }
            InvitationState::Closed { why } => Self { reason: Some(bounded_reason(&why)), ..body },
        }
    }
}

/// The proof that the caller may see the code.
pub struct ClusterOwner;

impl FromRequestParts<SharedApp> for ClusterOwner {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &SharedApp) -> Result<Self, ApiError> {
        let is_forwarded = ["forwarded", "x-forwarded-for"].iter().any(|name| parts.headers.contains_key(*name));
        if !app.keys().is_empty() || is_own_page(parts) && !is_forwarded {
            return Ok(Self);
        }
        let local = if is_forwarded { None } else { LocalOperator::from_request_parts(parts, app).await.ok() };
        let message = "this server has no API key: its cluster's invitations are shown on its own machine only, by \
                       `consort cluster invite` or on its page at http://localhost";
        local.map(|_| Self).ok_or_else(|| ApiError::new(ApiErrorKind::Forbidden, message).code("not_local"))
    }
}

/// Whether a request comes from a page that this server served to a browser on this machine.
fn is_own_page(parts: &Parts) -> bool {
    let address = parts.extensions.get::<RemoteAddress>().map(|address| address.0.to_canonical());
    let text = |value: Option<&axum::http::HeaderValue>| value.and_then(|value| value.to_str().ok()).map(str::to_owned);
    let host = text(parts.headers.get(HOST)).or_else(|| parts.uri.authority().map(ToString::to_string));
    let origin = text(parts.headers.get(ORIGIN));
    let origin = origin.as_deref().and_then(|origin| origin.split_once("://")).map(|(_, authority)| authority);
    address.is_some_and(|address| address.is_loopback())
        && origin.zip(host.as_deref()).is_some_and(|(origin, host)| origin.eq_ignore_ascii_case(host))
}

/// The last invitation
#[utoipa::path(
    get, path = "/v1/cluster/invitation", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The last invitation, open or not", body = InvitationBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 403, description = "The server has no keys, and this is not its own machine", body = OpenAiErrorBody),
        (status = 404, description = "There was none, or this server has no cluster", body = OpenAiErrorBody),
    )
)]
pub async fn show(_: ClusterOwner, State(app): State<SharedApp>) -> Result<Json<InvitationBody>, ApiError> {
    let inviter = inviter(&app)?;
    inviter.last().map(|last| Json(last.into())).ok_or_else(none)
}

/// Invite a machine to join the cluster: opens an invitation, or shows the open one
#[utoipa::path(
    post, path = "/v1/cluster/invitation", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The open invitation", body = InvitationBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 403, description = "The server has no keys, and this is not its own machine", body = OpenAiErrorBody),
        (status = 404, description = "This server has no cluster", body = OpenAiErrorBody),
        (status = 503, description = "It cannot be opened", body = OpenAiErrorBody),
    )
)]
pub async fn open(_: ClusterOwner, State(app): State<SharedApp>) -> Result<Json<InvitationBody>, ApiError> {
    let inviter = inviter(&app)?;
    let opened = blocking::run(move || Ok(inviter.open())).await?;
    opened.map(|opened| Json(opened.into())).map_err(|why| ApiError::unavailable(why, crate::error::RETRY_AFTER))
}

/// Close the open invitation
#[utoipa::path(
    delete, path = "/v1/cluster/invitation", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 204, description = "No invitation is open now"),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 403, description = "The server has no keys, and this is not its own machine", body = OpenAiErrorBody),
        (status = 404, description = "This server has no cluster", body = OpenAiErrorBody),
    )
)]
pub async fn close(_: ClusterOwner, State(app): State<SharedApp>) -> Result<StatusCode, ApiError> {
    let inviter = inviter(&app)?;
    blocking::run(move || {
        inviter.close();
        Ok(())
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

fn inviter(app: &SharedApp) -> Result<SharedInviter, ApiError> {
    let message = "this server has no cluster that others could join: start it with --cluster";
    app.inviter().ok_or_else(|| ApiError::new(ApiErrorKind::NotFound, message).code("no_cluster"))
}

fn none() -> ApiError {
    ApiError::new(ApiErrorKind::NotFound, "there was no invitation yet").code("no_invitation")
}
