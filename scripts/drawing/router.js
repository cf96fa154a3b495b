// react-router-dom-v5-compat, as @grafana/scenes imports it, from version 6 of the router.
export * from 'react-router-dom';
export const CompatRouter = ({ children }) => children;
export const CompatRoute = () => null;
