//! The table `calls`.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown, TableType};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties, ReplaceChildrenOptions,
};

use super::{bridge, pushdown};
use crate::capture::compact::memory_bytes;
use crate::capture::{Filter, Place, Query, Reader, columns, encode};
use crate::record::Call;

/// Rows that are handed over at a time, at most.
const BATCH_ROWS: usize = 1024;
/// About what they take in memory.
const BATCH_BYTES: usize = 4 << 20;

/// What readers left out, each once.
#[derive(Debug, Default)]
pub(super) struct LeftOut(Mutex<BTreeSet<String>>);

impl LeftOut {
    fn add(&self, what: Vec<String>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(what);
    }

    pub(super) fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// All calls of a folder, a row a sampled choice.
#[derive(Debug)]
pub(super) struct Calls {
    dir: Place,
    schema: SchemaRef,
    left_out: Arc<LeftOut>,
}

impl Calls {
    pub(super) fn new(dir: &Place, left_out: Arc<LeftOut>) -> Result<Self> {
        Ok(Self { dir: dir.clone(), schema: bridge::schema(&columns::schema())?, left_out })
    }
}

#[async_trait]
impl TableProvider for Calls {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    fn supports_filters_pushdown(&self, filters: &[&Expr]) -> Result<Vec<TableProviderFilterPushDown>> {
        let how = |filter: &&Expr| match pushdown::filter(filter, &self.schema) {
            Some(_) => TableProviderFilterPushDown::Exact,
            None => TableProviderFilterPushDown::Unsupported,
        };
        Ok(filters.iter().map(how).collect())
    }

    async fn scan(
        &self,
        _: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let all = || (0..self.schema.fields().len()).collect();
        let columns = projection.cloned().unwrap_or_else(all);
        let schema = Arc::new(self.schema.project(&columns)?);
        let filter = filters.iter().filter_map(|filter| pushdown::filter(filter, &self.schema));
        let query = Query {
            filter: filter.reduce(Filter::and),
            without_bodies: !has_any(&schema, &columns::BODIES),
            without_routing: !has_any(&schema, &columns::ROUTINGS),
            ..Query::default()
        };
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&schema)),
            Partitioning::UnknownPartitioning(1),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        let (dir, left_out, properties) =
            (self.dir.clone(), Arc::clone(&self.left_out), Arc::new(properties));
        Ok(Arc::new(Scan { dir, query, columns, limit, schema, properties, left_out }))
    }
}

fn has_any(schema: &SchemaRef, names: &[&str]) -> bool {
    names.iter().any(|name| schema.field_with_name(name).is_ok())
}

/// One pass over the folder.
#[derive(Debug, Clone)]
struct Scan {
    dir: Place,
    query: Query,
    /// Which columns of the schema, in this order.
    columns: Vec<usize>,
    /// At most so many rows.
    limit: Option<usize>,
    schema: SchemaRef,
    properties: Arc<PlanProperties>,
    left_out: Arc<LeftOut>,
}

impl DisplayAs for Scan {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.schema.fields().iter().map(|field| field.name().as_str()).collect();
        write!(f, "Calls: columns=[{}]", names.join(", "))?;
        if let Some(filter) = &self.query.filter {
            write!(f, ", where={filter}")?;
        }
        if let Some(limit) = self.limit {
            write!(f, ", limit={limit}")?;
        }
        write!(f, ", bodies={}, routing={}", !self.query.without_bodies, !self.query.without_routing)
    }
}

impl ExecutionPlan for Scan {
    fn name(&self) -> &'static str {
        "Calls"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        _: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, _: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        // One batch waits while the next is made.
        let mut stream = RecordBatchReceiverStream::builder(Arc::clone(&self.schema), 1);
        let (scan, batches) = (self.clone(), stream.tx());
        // Reading blocks. Whoever has enough rows drops the stream, and sending fails.
        stream.spawn_blocking(move || scan.read(&mut |batch| batches.blocking_send(batch).is_ok()));
        Ok(stream.build())
    }
}

impl Scan {
    /// Reads calls, until `send` says that nobody wants more.
    fn read(
        &self,
        send: &mut dyn FnMut(Result<datafusion::arrow::array::RecordBatch>) -> bool,
    ) -> Result<()> {
        let mut reader = Reader::open(&self.dir, self.query.clone()).map_err(external)?;
        let mut left = self.limit.unwrap_or(usize::MAX);
        loop {
            let (mut calls, mut bytes, mut is_end) = (vec![], 0, false);
            while calls.len() < BATCH_ROWS.min(left) && bytes < BATCH_BYTES {
                let Some(call) = reader.next() else {
                    is_end = true;
                    break;
                };
                let call = self.narrow(call.map_err(external)?);
                bytes += memory_bytes(&call);
                calls.push(call);
            }
            left -= calls.len();
            self.left_out.add(reader.left_out());
            let is_wanted = calls.is_empty() || send(self.batch(&calls));
            if is_end || !is_wanted || left == 0 {
                return Ok(());
            }
        }
    }

    /// What is large and not asked for is not copied.
    fn narrow(&self, mut call: Call) -> Call {
        let has = |name| has_any(&self.schema, &[name]);
        call.prompt_token_ids.take_if(|_| !has("prompt_token_ids"));
        call.completion_token_ids.take_if(|_| !has("completion_token_ids"));
        call.completion_logprobs.take_if(|_| !has("completion_logprobs"));
        call.client_request.take_if(|_| !has("client_request"));
        call.upstream_request.take_if(|_| !has("upstream_request"));
        call.response.take_if(|_| !has("response"));
        call.text.take_if(|_| !has("text"));
        call.tool_calls.take_if(|_| !has("tool_calls"));
        call
    }

    fn batch(&self, calls: &[Call]) -> Result<datafusion::arrow::array::RecordBatch> {
        let batch = encode::batch(calls).and_then(|batch| batch.project(&self.columns));
        bridge::batch(&batch.map_err(external)?)
    }
}

fn external(error: impl std::error::Error + Send + Sync + 'static) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}
