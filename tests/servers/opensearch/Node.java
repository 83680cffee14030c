import static org.codelibs.opensearch.runner.OpenSearchRunner.newConfigs;

import org.codelibs.opensearch.runner.OpenSearchRunner;

/** One node of OpenSearch, in this process: its directory, its port for HTTP and the one for other nodes. */
public class Node {
    public static void main(String[] args) throws Exception {
        new OpenSearchRunner().onBuild((number, settings) -> {
            settings.put("http.port", args[1]);
            settings.put("transport.port", args[2]);
            settings.put("network.host", "127.0.0.1");
            settings.put("discovery.type", "single-node");
            settings.put("cluster.routing.allocation.disk.threshold_enabled", "false");
        }).build(newConfigs().basePath(args[0]).numOfNode(1).clusterName("tests").useLogger());
        Thread.currentThread().join();
    }
}
