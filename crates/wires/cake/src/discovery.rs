//! Discovery: a master broadcasts queries over UDP, workers answer them.
//!
//! Neither is authenticated. The hash of the cluster key is a filter only, so what an answer says is a claim, and the
//! connection that follows has to authenticate.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::auth::CakeKey;

/// Where workers wait for queries.
pub const DISCOVERY_PORT: u16 = 10127;
/// How long a master looks for workers, unless told otherwise.
pub const DISCOVERY_WINDOW: Duration = Duration::from_secs(10);
/// Workers that a master looks for at most.
pub const WORKERS_MAX: usize = 256;

const MAGIC: &[u8; 4] = b"CAKE";
const QUERY_BYTES_MAX: usize = 4096;
const ANSWER_BYTES_MAX: usize = 65_535;
const QUERY_INTERVAL: Duration = Duration::from_secs(1);
/// How long a wait for a packet sleeps at most before it checks whether it is over.
const TICK: Duration = Duration::from_millis(100);
/// Answers per second: a query can have any source address, and its answer is longer than it.
const ANSWERS_PER_SECOND_MAX: u32 = 32;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Query {
    cluster_hash: String,
}

/// What a worker says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CakeAnnouncement {
    pub cluster_hash: String,
    pub worker_name: String,
    /// Where it listens for masters.
    pub port: u16,
    pub gpus: Vec<CakeGpu>,
    #[serde(default)]
    pub backend: String,
    #[serde(default)]
    pub hostname: String,
    #[serde(default)]
    pub os: String,
}

/// A device that runs layers, also a CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CakeGpu {
    pub name: String,
    pub vram_bytes: u64,
    #[serde(default)]
    pub tflops: f32,
}

/// A worker that answered.
#[derive(Clone, Debug, PartialEq)]
pub struct DiscoveredWorker {
    pub address: SocketAddr,
    pub announcement: CakeAnnouncement,
}

/// Answers queries with the announcement's cluster hash until `is_over`.
pub fn answer_queries(
    socket: &UdpSocket,
    announcement: &CakeAnnouncement,
    is_over: &(dyn Fn() -> bool + Sync),
) -> io::Result<()> {
    let answer = packet(announcement)?;
    let mut bytes = [0; QUERY_BYTES_MAX];
    let (mut second, mut answers) = (Instant::now(), 0);
    while !is_over() {
        let Some((bytes, source)) = receive(socket, &mut bytes, TICK)? else { continue };
        let is_ours = parse::<Query>(bytes).is_some_and(|query| query.cluster_hash == announcement.cluster_hash);
        if second.elapsed() >= Duration::from_secs(1) {
            (second, answers) = (Instant::now(), 0);
        }
        if is_ours && answers < ANSWERS_PER_SECOND_MAX {
            answers += 1;
            // The address may not be reachable any more, so the error is ignored.
            let _ = socket.send_to(&answer, source);
        }
    }
    Ok(())
}

/// Sends queries to `destinations` until the window has passed, `enough` workers have answered, or `is_over`.
pub fn discover(
    key: &CakeKey,
    destinations: &[SocketAddr],
    window: Duration,
    enough: usize,
    is_over: &(dyn Fn() -> bool + Sync),
) -> io::Result<Vec<DiscoveredWorker>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_broadcast(true)?;
    let cluster_hash = key.cluster_hash();
    let query = packet(&Query { cluster_hash: cluster_hash.clone() })?;
    let (begun, mut sent) = (Instant::now(), None::<Instant>);
    let mut bytes = vec![0; ANSWER_BYTES_MAX];
    let mut found: Vec<DiscoveredWorker> = Vec::new();
    while begun.elapsed() < window && found.len() < enough.min(WORKERS_MAX) && !is_over() {
        if sent.is_none_or(|sent| sent.elapsed() >= QUERY_INTERVAL) {
            sent = Some(Instant::now());
            // An interface may be down: the others count.
            destinations.iter().for_each(|destination| drop(socket.send_to(&query, destination)));
        }
        let Some((bytes, source)) = receive(&socket, &mut bytes, TICK)? else { continue };
        let Some(announcement) = parse::<CakeAnnouncement>(bytes) else { continue };
        let address = SocketAddr::new(source.ip(), announcement.port);
        let is_new = found.iter().all(|worker| worker.address != address);
        if is_new && announcement.cluster_hash == cluster_hash && announcement.port != 0 {
            found.push(DiscoveredWorker { address, announcement });
        }
    }
    Ok(found)
}

/// Where queries go: the broadcast addresses of all interfaces.
pub fn broadcast_addresses() -> io::Result<Vec<SocketAddr>> {
    let mut addresses = vec![SocketAddr::from((Ipv4Addr::BROADCAST, DISCOVERY_PORT))];
    for interface in if_addrs::get_if_addrs()? {
        if let if_addrs::IfAddr::V4(if_addrs::Ifv4Addr { broadcast: Some(broadcast), .. }) = interface.addr
            && !interface.is_loopback()
        {
            addresses.push(SocketAddr::new(IpAddr::V4(broadcast), DISCOVERY_PORT));
        }
    }
    addresses.sort();
    addresses.dedup();
    Ok(addresses)
}

fn packet(content: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut packet = MAGIC.to_vec();
    serde_json::to_writer(&mut packet, content)?;
    Ok(packet)
}

fn parse<'a, T: Deserialize<'a>>(packet: &'a [u8]) -> Option<T> {
    serde_json::from_slice(packet.strip_prefix(MAGIC)?).ok()
}

/// The next packet, if one comes within `wait`.
fn receive<'a>(socket: &UdpSocket, bytes: &'a mut [u8], wait: Duration) -> io::Result<Option<(&'a [u8], SocketAddr)>> {
    socket.set_read_timeout(Some(wait))?;
    match socket.recv_from(bytes) {
        Ok((count, source)) => Ok(Some((&bytes[..count], source))),
        // A port that was unreachable for an earlier packet is reported here.
        Err(error) if is_transient(&error) || error.kind() == ErrorKind::ConnectionRefused => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Reads a packet as either side does.
pub fn read_any_packet(packet: &[u8]) {
    let _ = (parse::<Query>(packet), parse::<CakeAnnouncement>(packet));
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    fn announcement(key: &CakeKey, port: u16) -> CakeAnnouncement {
        CakeAnnouncement {
            cluster_hash: key.cluster_hash(),
            worker_name: "worker".to_owned(),
            port,
            gpus: vec![CakeGpu { name: "CPU (x86_64)".to_owned(), vram_bytes: 1 << 34, tflops: 2.0 }],
            backend: "cpu".to_owned(),
            hostname: "host".to_owned(),
            os: "linux".to_owned(),
        }
    }

    #[test]
    fn packets_have_the_form_that_cake_reads() {
        let key = CakeKey::new("consort").unwrap();
        let query = packet(&Query { cluster_hash: key.cluster_hash() }).unwrap();
        assert_eq!(query, br#"CAKE{"cluster_hash":"53aac2b2"}"#);
        let answer =
            br#"CAKE{"cluster_hash":"53aac2b2","worker_name":"w","port":10128,"gpus":[{"name":"g","vram_bytes":5}]}"#;
        let parsed: CakeAnnouncement = parse(answer).unwrap();
        assert_eq!((parsed.port, parsed.gpus[0].vram_bytes, parsed.gpus[0].tflops), (10128, 5, 0.0));
        assert_eq!(parse::<CakeAnnouncement>(b"CAKE"), None);
        assert_eq!(parse::<Query>(br#"CAKA{"cluster_hash":""}"#), None);
    }

    #[test]
    fn a_master_finds_the_workers_of_its_cluster() {
        let (key, other) = (CakeKey::new("a key").unwrap(), CakeKey::new("another key").unwrap());
        // Two have the same name, which does not make them one worker.
        let workers = [(&key, 11), (&key, 12), (&other, 13)]
            .map(|(key, port)| (UdpSocket::bind("127.0.0.1:0").unwrap(), announcement(key, port)));
        let is_over = AtomicBool::new(false);
        let found = thread::scope(|scope| {
            for (socket, announcement) in &workers {
                scope.spawn(|| answer_queries(socket, announcement, &|| is_over.load(Ordering::Relaxed)).unwrap());
            }
            let destinations = workers.each_ref().map(|(socket, _)| socket.local_addr().unwrap());
            let found = discover(&key, &destinations, Duration::from_secs(60), 2, &|| false).unwrap();
            is_over.store(true, Ordering::Relaxed);
            found
        });
        let mut ports: Vec<_> = found.iter().map(|worker| worker.address.port()).collect();
        ports.sort_unstable();
        assert_eq!(ports, [11, 12]);
        assert_eq!(found[0].announcement, announcement(&key, found[0].address.port()));
    }

    proptest! {
        #[test]
        fn any_packet_is_read_or_refused(packet: Vec<u8>) {
            read_any_packet(&packet);
            read_any_packet(&[&MAGIC[..], &packet].concat());
        }
    }
}
