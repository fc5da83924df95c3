//! Every limit of a node, with its name.

use std::time::Duration;

/// Connections to one peer: direct ones over several transports, relayed ones, and those that test reachability.
pub const CONNECTIONS_PER_PEER_MAX: usize = 8;
/// Connections that others opened.
pub const INCOMING_CONNECTIONS_MAX: usize = 512;
/// Incoming connections beyond these that are being closed for others.
pub const CLOSING_CONNECTIONS_MAX: usize = 64;
/// Connections that this node opened.
pub const OUTGOING_CONNECTIONS_MAX: usize = 512;
/// Incoming handshakes and connections from one IPv4 address, or from one IPv6 network.
pub const INCOMING_CONNECTIONS_PER_ADDRESS_MAX: usize = 64;
/// Connections from others whose handshake is not complete.
pub const INCOMING_HANDSHAKES_MAX: usize = 256;
pub const OUTGOING_HANDSHAKES_MAX: usize = 128;
/// The longest handshake of a connection.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// A connection without streams is closed after this time.
pub const IDLE_CONNECTION_TIME: Duration = Duration::from_secs(300);

/// Streams of any protocol in one connection.
pub const STREAMS_PER_CONNECTION_MAX: usize = 256;
/// Streams that a peer has opened in one connection and that are in use.
pub const INCOMING_STREAMS_PER_CONNECTION_MAX: usize = 64;
/// Streams that peers have opened and that are in use.
pub const INCOMING_STREAMS_MAX: usize = 4096;
/// Streams that wait until [`IncomingStreams`](crate::IncomingStreams) is asked for them; more are refused.
pub const INCOMING_QUEUE_MAX: usize = 256;
/// Incoming streams of one connection whose protocol is not negotiated.
pub const STREAM_NEGOTIATIONS_MAX: usize = 64;
/// The longest negotiation of a stream's protocol.
pub const STREAM_NEGOTIATION_TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes that a QUIC stream, and all of a QUIC connection, may hold until they are read.
pub const QUIC_STREAM_BYTES_MAX: u32 = 10_000_000;
pub const QUIC_CONNECTION_BYTES_MAX: u32 = 15_000_000;

/// The longest time until a stream to a peer is open: its addresses, a look-up and relays are tried in it.
pub const OPEN_TIME_MAX: Duration = Duration::from_secs(30);
/// Streams that wait for a connection.
pub const WAITING_OPENS_MAX: usize = 1024;
/// Calls of handles that wait for the node.
pub const COMMANDS_MAX: usize = 256;
/// A node that has just joined looks nobody up before a peer has told it what it is, but waits no longer than this.
pub const JOIN_TIME_MAX: Duration = Duration::from_secs(10);
/// Look-ups at once.
pub const LOOKUPS_MAX: usize = 128;
/// The longest look-up.
pub const LOOKUP_TIME_MAX: Duration = Duration::from_secs(20);
/// Providers that one look-up returns.
pub const PROVIDERS_MAX: usize = 256;
/// The longest key of a provider.
pub const KEY_BYTES_MAX: usize = 64;
/// Keys that a node provides.
pub const PROVIDED_KEYS_MAX: usize = 1024;
/// Keys of others whose providers a node stores.
pub const FOREIGN_KEYS_MAX: usize = 4096;
/// Providers that a node stores for one key.
pub const PROVIDERS_PER_KEY_MAX: usize = 20;
/// A provider is forgotten after this time unless it announces itself again, which it does more often.
pub const PROVIDER_TIME: Duration = Duration::from_secs(1800);
pub const PROVIDER_ANNOUNCE_INTERVAL: Duration = Duration::from_secs(600);

/// Addresses of one peer, or of this node, that are kept or announced.
pub const ADDRESSES_PER_PEER_MAX: usize = 10;
/// Peers whose addresses are kept.
pub const KNOWN_PEERS_MAX: usize = 1000;
/// Own addresses that are known to be reached.
pub const OWN_ADDRESSES_MAX: usize = 64;
/// Own addresses, as reported by peers, that are tested in [`ADDRESS_CANDIDATE_TIME`]: in all, and as reported from one IP address.
pub const ADDRESS_CANDIDATES_MAX: usize = 64;
pub const ADDRESS_CANDIDATES_PER_REPORTER_MAX: usize = 8;
pub const ADDRESS_CANDIDATE_TIME: Duration = Duration::from_secs(3600);
/// Characters of a peer's description of itself.
pub const AGENT_CHARS_MAX: usize = 64;
/// Changes of peers that a receiver may lag behind.
pub const CHANGES_MAX: usize = 256;

pub const PING_INTERVAL: Duration = Duration::from_secs(5);
pub const PING_TIME_MAX: Duration = Duration::from_secs(10);
/// A connection is closed when so many pings in a row had no answer.
pub const PING_FAILURES_MAX: u32 = 2;

/// Relays at which a node that is not reachable has reservations.
pub const RESERVATIONS_MAX: usize = 2;
/// Peers that are known to be relays.
pub const RELAY_CANDIDATES_MAX: usize = 32;
/// The time that a node has to find out that it is reachable, before it uses relays.
pub const RELAY_DELAY: Duration = Duration::from_secs(8);
/// A relay that refused or was lost is asked again after this time.
pub const RELAY_RETRY_TIME: Duration = Duration::from_secs(15);

/// A direct connection to a peer that is reached through a relay is tried again after this time, which doubles up to the
/// second.
pub const UPGRADE_RETRY_TIME_MIN: Duration = Duration::from_secs(15);
pub const UPGRADE_RETRY_TIME_MAX: Duration = Duration::from_secs(600);
/// The longest of these attempts: the two peers try it a few times.
pub const UPGRADE_TIME_MAX: Duration = Duration::from_secs(60);

/// What a relay server spends on others.
pub const RELAY_RESERVATIONS_MAX: usize = 128;
pub const RELAY_RESERVATIONS_PER_PEER_MAX: usize = 4;
pub const RELAY_RESERVATION_TIME: Duration = Duration::from_secs(3600);
pub const RELAY_CIRCUITS_MAX: usize = 64;
pub const RELAY_CIRCUITS_PER_PEER_MAX: usize = 8;
pub const RELAY_CIRCUIT_TIME_MAX: Duration = Duration::from_secs(3600);
/// Bytes that a circuit may carry, in both directions together.
pub const RELAY_CIRCUIT_BYTES_MAX: u64 = 4 << 30;
/// Reservations and circuits that a relay grants to one peer, and to one IP address, per minute.
pub const RELAY_REQUESTS_PER_MINUTE_MAX: u32 = 60;

/// The first wait before a lost bootstrap peer is dialled again. It doubles up to the second.
pub const BOOTSTRAP_RETRY_TIME_MIN: Duration = Duration::from_secs(1);
pub const BOOTSTRAP_RETRY_TIME_MAX: Duration = Duration::from_secs(60);
/// Connections that are opened because a peer was seen on the LAN.
pub const LAN_CONNECTIONS_MAX: usize = 64;
/// IP addresses that are dialled because mDNS found them.
pub const LAN_ADDRESSES_MAX: usize = 256;
