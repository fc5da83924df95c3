//! How machines find each other: mDNS service discovery, and addresses that a person gave.
//!
//! A node announces `_consort._tcp.local.` ([`Announcer`]); a coordinator browses for it ([`Browser`]) and gets an event
//! for every node that comes or goes. What is announced is not authenticated: it tells where to connect, and if another version
//! makes that vain. The handshake of the connection decides, also to which cluster a node belongs. Invitations for machines without a key are announced as
//! `_consort-invite._tcp.local.` ([`InvitationAnnouncer`]).

mod announcement;
mod announcer;
mod browser;
mod interfaces;
mod invitations;
mod node_table;

pub use announcement::{Announcement, InvalidAnnouncement, NODE_NAME_BYTES_MAX, NodeName};
pub use announcer::Announcer;
pub use browser::{Browser, BrowserSettings, DiscoveryEvent};
pub use interfaces::Interfaces;
pub use invitations::{FoundInvitation, InvitationAnnouncer, find_invitations};
pub use node_table::{ADDRESSES_MAX, DiscoveredNode, NODES_FOUND_MAX, NodeId, OTHER_VERSIONS_FOUND_MAX, Unusable};

/// The DNS-SD type of a node's service.
const SERVICE_TYPE: &str = "_consort._tcp.local.";

/// The UDP port of mDNS.
pub const MDNS_PORT: u16 = 5353;

#[derive(Debug, thiserror::Error)]
#[error("discovery by mDNS")]
pub struct DiscoveryError(#[from] mdns_sd::Error);
