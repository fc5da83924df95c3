//! The TLS configuration: a certificate chain and its private key.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the certificate file has no certificate")]
    NoCertificate,
    #[error("read the certificate")]
    Certificate(#[source] pem::Error),
    #[error("read the private key")]
    Key(#[source] pem::Error),
    #[error("use the certificate with its key")]
    Unusable(#[from] rustls::Error),
}

/// The TLS configuration of a server.
#[derive(Clone, Debug)]
pub struct Tls(pub(super) Arc<ServerConfig>);

impl Tls {
    /// Reads PEM: the certificate chain and the private key.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain: Vec<_> =
            CertificateDer::pem_slice_iter(certificates).collect::<Result<_, _>>().map_err(TlsError::Certificate)?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(TlsError::Key)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }
}
